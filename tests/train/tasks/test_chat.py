"""Conversations: their forms, text by a chat template, tokens of answers, generated text, runs."""

import json

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from fastkd.train.data import Encoder
from fastkd.train.errors import InputError
from fastkd.train.fitting import is_on_policy
from fastkd.train.generation import Draw
from fastkd.train.models import load_trained
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.chat import TASK, _written, prompts_of
from tests.support.runs import losses_of, report_of
from tests.support.tiny import run, sentences, usual
from tests.train.tasks.through import TEMPLATE, make_chat_teacher, rows_of, says, told, write_chats

# As Qwen3's: earlier thoughts are dropped, and the last answer gets an empty one.
THINKS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}{%- for m in messages %}{%- if m.role != 'assistant' %}
{{- '[CLS] ' + m.role + ' ' + m.content + ' [SEP]\n' }}{%- else %}{{- '[CLS] assistant\n' }}
{%- set inside = m.content.rpartition('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set thought = inside or m.reasoning_content or '' %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}
{%- for call in m.tool_calls or [] %}{{- ' <call> ' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- ' ' + key + ' ' + value }}{%- endfor %}
{%- endfor %}{{- ' [SEP]\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '[CLS] assistant\n' }}{%- endif %}"""
# As R1-Distill's: it drops every thought, and its prompt begins one.
DROPS = (
    "{% for m in messages %}{% if m.role == 'user' %}[CLS] {{ m.content }} {% else %}"
    "[MASK] {{ m.content.split('</think>')[-1] }} [SEP]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[MASK] <think>\n{% endif %}"
)
# As gpt-oss': thoughts of their own field, and a last turn that ends otherwise than earlier ones.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'user' %}user {{ m.content }} [SEP] "
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}assistant fine {{ m.thinking }} [SEP] {% endif %}"
    "assistant is {{ m.content }} [CLS]"
    "{% else %}assistant is {{ m.content }} [SEP] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
# Without a prompt of its own, and it changes answers.
SHOUTS = "{% for m in messages %}{{ m.role }} {{ m.content | capitalize }} [SEP] {% endfor %}"
MARKS = TEMPLATE.replace(
    "{{ m.content }} [SEP] ", "{% generation %}{{ m.content }} [SEP]{% endgeneration %} "
)
SWITCHED = "{{ '[MASK] ' if enable_thinking else '' }}" + THINKS
UPPER = "{{ messages | length }}{% for m in messages %}{{ m.content | upper }} {% endfor %}"
FINE, THOUGHT = "<think>\nfine\n</think>\n\n", "<think> fine </think> bad [SEP]"
TOOLS = "{% if tools %}{{ tools[0].name }} {% endif %}" + THINKS


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def tokenizer(teacher):
    return AutoTokenizer.from_pretrained(teacher)


@pytest.fixture(params=["fast", "slow"])
def read(tokenizer, request, monkeypatch, tmp_path):
    """The text of a conversation, its parts that count, and the answer that ROUGE-L compares.

    Unless it is ``labelled``, it is read as by `fastkd predict`.
    """
    tokenizer.add_tokens(["<think>", "</think>", "<call>", "assistant", "user", "tool"])
    if request.param == "slow":
        monkeypatch.setattr(type(tokenizer), "is_fast", False)

    def read(talk, template=THINKS, tools=None, length=64, labelled=True, **task):
        tokenizer.chat_template = template
        columns = {} if labelled else {"label": None}
        row = {"messages": talk, "tools": tools}
        rows = rows_of(tmp_path / "a.jsonl", TASK, [row], **columns)
        found = Encoder(tokenizer, length, TASK(**task, predicting=not labelled))(rows)
        words, labels = tokenizer.convert_ids_to_tokens(found[0]["input_ids"]), found[0]["labels"]
        counted = [w if x != -100 else "_" for w, x in zip(words, labels, strict=True)]
        parts = [part.strip() for part in " ".join(counted).split("_") if part.strip()]
        if labelled:  # of a student's own answers, and of predictions
            (batch,) = found.batches(TASK().collator(tokenizer), 1)
            prompt = " ".join(tokenizer.convert_ids_to_tokens(prompts_of(batch)[0]))
            assert f"{prompt} {parts[-1]}" == " ".join(words)
            assert read(talk, template, tools, length, False, **task)[0] == prompt
        return " ".join(words), parts, found.evaluation_columns["answer"][0]

    return read


def test_too_long_a_conversation_keeps_its_middle(read):
    for length, question, answer in (
        (12, "[CLS] a the film is [MASK]", "good fine nice bad poor [SEP]"),
        (11, "[CLS] a the film is [MASK]", "good fine nice bad poor"),
        (6, "film is [MASK]", "good fine nice"),
    ):
        talk = says("a the film is", "good fine nice bad poor")
        text, parts, _ = read(talk, TEMPLATE, length=length)
        assert (text, parts) == (f"{question} {answer}", [answer])


@pytest.mark.left_out(where=lambda x: x["read"] == "slow")  # it can't follow marks
@pytest.mark.parametrize(("template", "words"), [
    (None, "--task chat needs a tokenizer with a chat template"),
    (UPPER, "message 2 cannot be found.*put {% generation %} and {% endgeneration %} around"),
    ("{{ raise_exception('only systems') }}", "row 1: the .* template refuses it .only systems"),
    ("{% if x %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0].content }}",
     "row 1: the .* template marks no token"),
])  # fmt: skip
def test_a_template_that_does_not_tell(read, template, words):
    with pytest.raises(InputError, match=words):
        read(says("a film", "good"), template)


def apart(rows, name):
    """A column of each conversation of packed rows, sorted."""
    found = []
    for row in rows:
        starts = [i for i, at in enumerate(row["position_ids"]) if at == 0]
        found += [row[name][a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return sorted(found)


def test_what_a_student_draws_is_masked_exactly_in_packed_rows_too(teacher, tokenizer, tmp_path):
    """That packed rows teach the same: tests/distill/test_distiller.py."""
    model, task = GPT2LMHeadModel.from_pretrained(teacher).train(), TASK()
    data, collate = rows_of(write_chats(tmp_path / "a.jsonl", 9), TASK), task.collator(tokenizer)
    rows, packed = (Encoder(tokenizer, 29, x)(data) for x in (task, task.for_packing()))
    assert len(packed) == 3 and max(packed.lengths) == 29  # which its conversations fill
    for name in ("input_ids", "labels"):
        assert apart(packed, name) == sorted(row[name] for row in rows)
    together = collate([*packed])
    for row, positions in zip(packed, together["position_ids"], strict=True):
        assert positions[: len(row["labels"])].tolist() == row["position_ids"]
    (batch,) = rows.batches(collate, 9)
    drawn = task.generated(model, batch, tokenizer, 0)
    assert model.training
    end, lengths = tokenizer.sep_token_id, set()
    for row, prompt in zip(drawn, prompts_of(batch), strict=True):
        written = row["input_ids"][len(prompt) :]
        assert row["input_ids"] == prompt + written
        assert row["labels"] == [-100] * len(prompt) + written
        assert end not in written[:-1] and (written[-1] == end or len(written) == 16)
        lengths.add(len(written))
    assert len(lengths) > 1
    # For every batch: one row only, another order, or packed.
    other = [rows[i] for i in reversed(range(9))]
    assert task.generated(model, collate(other), tokenizer, 0) == drawn[::-1]
    assert task.generated(model, collate(other[:1]), tokenizer, 0) == drawn[-1:]
    assert task.generated(model, batch, tokenizer, 1) != drawn
    together = task.generated(model, together, tokenizer, 0)
    assert apart(together, "input_ids") == sorted(row["input_ids"] for row in drawn)
    for task, words in (
        (TASK(separate_documents=False), "--pack: the model does not separate the conversations"),
        (named("causal-lm")(), "--pack: rows of --task causal-lm are not packed"),
    ):
        with pytest.raises(InputError, match=words):
            task.for_packing()


def test_words_are_drawn_as_often_as_they_are_likely_and_steps_are_spread():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log().expand(4000, 5)
    found = Draw(3, [[i] for i in range(4000)])(torch.zeros(4000, 1), scores).argmax(-1)
    shares = found.bincount(minlength=5) / 4000
    torch.testing.assert_close(shares, scores[0].exp(), atol=0.03, rtol=0)
    for share, count in ((0.1, 100), (0.29, 290), (1 / 3, 333), (1.0, 1000)):
        steps = [is_on_policy(step, share) for step in range(1000)]
        assert sum(steps) == count
        assert sum(steps[:100]) == count // 10


def test_losses_of_an_epoch_do_not_depend_on_the_log(tmp_path):
    """Not every step has labels, and the last one has fewer rows and micro-batches.

    Sampled text depends on --seed alone, also in `fastkd evaluate`, by the student's manifest. With
    answers of its own in every step a student learns from the teacher alone.
    """
    talks = [says(text, text.split()[0]) for text, _ in sentences(12, 0)]
    thoughts = {"reasoning_content": "fine"}, {"thinking": "poor"}, {"content": f"{FINE}bad"}
    for i, thought in enumerate(thoughts):
        for talk in talks[i::4]:
            talk[1] |= thought
    teacher, data = tmp_path / "gpt2", write_chats(tmp_path / "a.jsonl", talks)
    make_chat_teacher(teacher, template=THINKS)
    options = {"task": "chat", "teacher": teacher, "train": data, "eval": data, "max_length": 32,
               "method": "soft_targets", "batch_size": 5, "max_new_tokens": 2, "sample": 0.5,
               "learning_rate": 1e-2}  # fmt: skip
    found = []
    for logging, accumulate, share in ((1, None, 0.5), (2, 4, 0.5), (3, None, 1)):
        args, out = tmp_path / f"{logging}.yaml", tmp_path / str(logging)
        args.write_text(f"logging_steps: {logging}\n")
        options |= {"trainer_args": args, "accumulate": accumulate, "out": out}
        said = run("distill", **usual(tmp_path, tmp_path, **options, on_policy=share))
        found.append(losses_of(out))
    assert found[1] == pytest.approx(found[0], rel=1e-4) and set(found[2]) == {"loss", "soft"}
    assert "thoughts (--thinking keep): 9 training answers with and 3 without, 9 eval" in said
    student, scores = out / "student", tmp_path / "scores.json"
    run("evaluate", model=student, data=data, batch_size=2, out=scores, device="cpu")
    assert read_json(scores)["rouge_l"] == report_of(out)["student"]["rouge_l"]
    card = (student / "README.md").read_text()
    assert "`--thinking keep`, in 75% of the training answers" in card
    rows = told(student, data, tmp_path / "told.jsonl")
    assert all({"thought", "answer"} <= row.keys() for row in rows)
    task = load_trained(str(student), False)[2]
    assert (task.thinking, task.thoughts) == ("keep", 0.75)


def test_what_a_template_inserts_is_prompt_and_thoughts_are_learned(read):
    """An empty <think></think> was trained as the answer; two turns were refused."""
    prompt = (
        "[CLS] user a film [SEP] [CLS] assistant good [SEP] [CLS] user so [SEP] "
        "[CLS] assistant <think> </think>"
    )
    expected = f"{prompt} bad film [SEP]", ["good [SEP]", "bad film [SEP]"], "bad film"
    assert read(says("a film", "good", "so", "bad film")) == expected
    # Of the data, of which earlier ones are dropped.
    inside = says("a film", f"{FINE}good", "so", f"{FINE}bad")
    beside = says("a film", "good", "so", "bad")
    beside[1]["reasoning_content"] = beside[3]["reasoning_content"] = "fine"
    for talk in (inside, beside):
        assert read(talk)[1:] == (["good [SEP]", THOUGHT], "bad")
    # A turn that ends otherwise than the last; a template without a prompt of its own.
    talk = says("so", "good", "a", "bad")
    assert read(talk, CHANNELS)[1] == ["good", "bad [CLS]"]
    assert read(talk, SHOUTS)[1] == ["good [SEP]", "bad [SEP]"]
    # Tools, their calls, and what they answer, which is not learned.
    call = {"id": "1", "type": "function", "function": {"name": "film", "arguments": '{"a": "so"}'}}
    talk = [
        *says("is"), {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "very good", "tool_call_id": "1"}, says("a", "nice")[1],
    ]  # fmt: skip
    called = "<call> film a so"
    text, *found = read(talk, TOOLS, [{"name": "film"}])
    assert text.startswith("film [CLS]") and found == [[f"{called} [SEP]", "nice [SEP]"], "nice"]
    assert read(talk[:2])[1:] == ([f"{called} [SEP]"], called)


@pytest.mark.left_out(where=lambda x: x["read"] == "slow")  # of templates: the tests around it
@pytest.mark.parametrize(("template", "own", "keep", "prompt"), [
    (THINKS, "reasoning_content", THOUGHT, "[CLS] user so [SEP] [CLS] assistant"),
    (THINKS, "content", THOUGHT, "[CLS] user so [SEP] [CLS] assistant"),
    (DROPS, "reasoning_content", "fine </think> bad [SEP]", "[CLS] so [MASK] <think>"),
    (CHANNELS, "thinking", "fine fine [SEP] assistant is bad [CLS]", "user so [SEP] assistant"),
    (CHANNELS, "content", "<think> fine </think> bad [CLS]", "user so [SEP] assistant is"),
    (MARKS, "content", THOUGHT, "[CLS] so [MASK]"),
    # The template switches by the row.
    (SWITCHED, "reasoning_content", THOUGHT, "[MASK] [CLS] user so [SEP] [CLS] assistant"),
    ("{% for m in messages %}[CLS] {{ m.content }} [SEP] {% endfor %}", "reasoning_content",
     THOUGHT, "[CLS] so [SEP] [CLS]"),
])  # fmt: skip
def test_thoughts_are_kept_dropped_or_read(read, template, own, keep, prompt):
    """Whatever the template does with them; `fastkd predict` asks as the training."""
    bare, talk = says("so", "bad"), says("so", "bad")
    talk[1][own] = f"{FINE}bad" if own == "content" else "fine"
    text, end = f"{prompt} {keep}", keep.split()[-1]
    assert read(talk, template, thoughts=1.0) == (text, [keep], "bad")
    if own != "content":
        assert read(talk[:1], template, labelled=False, thoughts=1.0)[0] == prompt
    plain = read(bare, template)
    assert read(talk, template, thinking="drop") == plain != read(talk, template)
    assert read(talk, template, thinking="prompt") == (text, [f"bad {end}"], "bad")
    talk[1]["content"] = talk[1]["content"].removesuffix("bad")
    found = read(talk, template, labelled=False, thinking="prompt")[0]
    assert found == text.removesuffix(f" bad {end}")


def test_thoughts_and_answers_that_were_written(tokenizer):
    """ROUGE-L compared thought and answer with the answer alone."""
    names = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.add_tokens(["<think>", "</think>", "assistant", "analysis", "final"])
    ids = tokenizer.convert_tokens_to_ids
    channels = (
        "<|channel|> analysis <|message|> fine <|end|> <|start|> assistant <|channel|> final "
        "<|message|> good [SEP]"
    )
    for prompt, written, expected in (
        ("[CLS]", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think>", "fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think> so </think>", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine fine", ("fine fine", "")),
        ("[CLS]", channels, ("fine", "good")),
    ):
        assert _written(ids(prompt.split()), ids(written.split()), tokenizer) == expected


def test_forms(tmp_path):
    talk = says("a film", "good", "so", "bad")
    names = ("human", "gpt") * 2
    told = [{"from": name, "value": m["content"]} for name, m in zip(names, talk, strict=True)]
    system, developer = ({"role": r, "content": "be fine"} for r in ("system", "developer"))
    alpaca = {"instruction": "so", "input": "", "output": "bad"}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "film"}]
    call = {"name": "film", "arguments": {"a": "so"}}
    called = {"role": "assistant", "content": ""}
    called["tool_calls"] = [{"type": "function", **call, "function": call}]
    shared = [{"from": "function_call", "value": json.dumps(call)},
              {"from": "observation", "value": "very"}]  # fmt: skip
    for row, expected, *columns in (
        ({"conversations": told}, talk),
        ({"conversations": talk}, talk),
        ({"conversations": told, "system": "be fine"}, [system, *talk]),
        ({"conversations": [*told[:1], *shared, told[1]]},
         [talk[0], called, {"role": "tool", "content": "very"}, talk[1]]),
        ({"messages": [system, *talk], "system": "no"}, [system, *talk]),
        ({"messages": [developer, *talk], "system": "no"}, [developer, *talk]),
        ({"messages": [{"role": "user", "content": parts}, talk[1]]}, talk[:2]),
        ({**alpaca, "instruction": "a", "input": "b"}, says("a\n\nb", "bad")),
        ({**alpaca, "instruction": "", "input": "so"}, talk[2:]),
        # System and history of Alpaca were dropped.
        ({**alpaca, "system": "be fine", "history": [["a film", "good"]]}, [system, *talk]),
        ({**alpaca, "input": None, "history": None, "system": None}, talk[2:]),
        ({"prompt": "so", "completion": "bad"}, talk[2:]),
        ({"prompt": talk[:3], "completion": talk[3:]}, talk),
        # Columns by name.
        ({"dialog": talk}, talk, {"text": "dialog"}),
        ({"q": "so", "a": "bad"}, talk[2:], {"text": "q", "label": "a"}),
    ):  # fmt: skip
        rows = rows_of(tmp_path / "rows.jsonl", TASK, [row, row], **dict(*columns))
        assert [[*map(json.loads, kept)] for kept in rows.column("text")] == [expected] * 2
