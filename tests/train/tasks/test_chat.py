"""Conversations: their forms, text by a chat template, tokens of answers, generated text, runs."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from fastkd.train.data import Encoder, read_file
from fastkd.train.errors import InputError
from fastkd.train.fitting import is_on_policy
from fastkd.train.generation import Draw
from fastkd.train.models import load_trained
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.chat import TASK, _written, prompts_of
from tests.support.runs import losses_of, made, report_of
from tests.support.tiny import run, usual
from tests.train.tasks.through import (
    TEMPLATE,
    encoded,
    make_chat_teacher,
    rows_of,
    says,
    told,
    write_chats,
    write_jsonl,
)

# As Qwen3's: earlier thoughts are dropped, and the last answer gets an empty one.
THINKS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '[CLS] ' + m.role + ' ' + m.content + ' [SEP]\n' }}
{%- else %}
{%- set content = m.content %}{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '[CLS] assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{- ' <call> ' + call.function.name }}
{%- for key in call.function.arguments %}
{{- ' ' + key + ' ' + call.function.arguments[key] }}{%- endfor %}{%- endfor %}
{{- ' [SEP]\n' }}{%- endif %}{%- endfor %}
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


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def tokenizer(teacher):
    return AutoTokenizer.from_pretrained(teacher)


@pytest.fixture
def model(teacher):
    return GPT2LMHeadModel.from_pretrained(teacher).eval()


@pytest.fixture
def tokens(tokenizer, tmp_path):
    """Rows and tokens of conversations, given or drawn."""

    def tokens(rows, length=16, task=None):
        path = write_chats(tmp_path / "tokens.jsonl", rows)
        return encoded(path, task or TASK(), tokenizer, length)

    return tokens


def test_too_long_a_conversation_keeps_its_middle(tokenizer, tokens):
    for length, kept in (
        (12, "[CLS] a the film is [MASK] good fine nice bad poor [SEP]"),
        (11, "[CLS] a the film is [MASK] good fine nice bad poor"),
        (6, "film is [MASK] good fine nice"),
    ):
        (row,) = tokens([says("a the film is", "good fine nice bad poor")], length)
        assert " ".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) == kept
        assert [label != -100 for label in row["labels"]].index(True) == kept.split().index("good")


@pytest.mark.parametrize(("template", "words"), [
    (None, "--task chat needs a tokenizer with a chat template"),
    ("{{ messages[-1].content | upper }}", "row 1: the tokens of message 2 cannot be found"),
    ("{{ raise_exception('only systems') }}",
     "row 1: the .* template refuses it .only systems"),
    ("{% if x %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0].content }}",
     "row 1: the .* template marks no token"),
])  # fmt: skip
def test_a_template_that_does_not_tell(tokenizer, tokens, template, words):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=words):
        tokens([says("a film", "good")])


def apart(row, name):
    starts = [i for i, at in enumerate(row["position_ids"]) if at == 0]
    ends = [*starts[1:], len(row["position_ids"])]
    return [row[name][a:b] for a, b in zip(starts, ends, strict=True)]


def test_what_a_student_draws_is_masked_exactly(tokenizer, model, tokens):
    model.train()
    task, rows = TASK(), tokens(6)
    collate = task.collator(tokenizer)
    (batch,) = rows.batches(collate, 6)
    drawn = task.generated(model, batch, tokenizer, 0)
    assert model.training
    end, lengths = tokenizer.sep_token_id, set()
    for row, prompt in zip(drawn, prompts_of(batch), strict=True):
        ids, labels = row["input_ids"], row["labels"]
        written = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + written
        assert end not in written[:-1] and (written[-1] == end or len(written) == 16)
        lengths.add(len(written))
    assert len(lengths) > 1
    # For every batch: one row only, another order, or packed.
    other = [rows[i] for i in reversed(range(6))]
    assert task.generated(model, collate(other), tokenizer, 0) == drawn[::-1]
    assert task.generated(model, collate(other[:1]), tokenizer, 0) == drawn[-1:]
    assert task.generated(model, batch, tokenizer, 1) != drawn
    together = task.generated(model, collate([*tokens(6, 32, task.for_packing())]), tokenizer, 0)
    alone = [row["input_ids"] for row in drawn]
    assert len(together) < 6 and sorted(alone) == sorted(
        ids for row in together for ids in apart(row, "input_ids")
    )


def test_packed_rows_hold_the_tokens_of_the_conversations(tokenizer, tokens):
    """That they teach the same: tests/distill/test_distiller.py."""
    single, packed = (tokens(9, 32, x) for x in (TASK(), TASK().for_packing()))
    assert len(packed) < 6 and max(packed.lengths) <= 32 < 2 * min(sorted(packed.lengths)[1:])
    for name in ("input_ids", "labels"):
        together = sorted(part for row in packed for part in apart(row, name))
        assert together == sorted(row[name] for row in single)
    batch = TASK().collator(tokenizer)([*packed])
    for i, row in enumerate(packed):
        assert batch["position_ids"][i][: len(row["labels"])].tolist() == row["position_ids"]
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
    for share, count in ((0.1, 100), (0.25, 250), (1 / 3, 333), (1.0, 1000)):
        steps = [is_on_policy(step, share) for step in range(1000)]
        assert sum(steps) == count
        assert sum(steps[:100]) == pytest.approx(100 * share, abs=1)


def test_losses_of_an_epoch_do_not_depend_on_the_log(teacher, tmp_path):
    """Not every step has labels, and the last one has fewer rows and micro-batches.

    Sampled text depends on --seed alone, also in `fastkd evaluate`, by the student's manifest.
    """
    files = [write_chats(tmp_path / f"{i}.jsonl", 12, i) for i in range(2)]
    found = []
    for logging, accumulate in ((1, None), (2, 4)):
        args, out = tmp_path / f"{logging}.yaml", tmp_path / str(logging)
        args.write_text(f"logging_steps: {logging}\n")
        run("distill", task="chat", train=files[0], eval=files[1], teacher=teacher, max_length=16,
            method="soft_targets", epochs=1, batch_size=5, device="cpu", on_policy=0.5,
            learning_rate=1e-2, max_new_tokens=2, sample=0.5, trainer_args=args,
            accumulate=accumulate, out=out)  # fmt: skip
        found.append(losses_of(out))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    scores = tmp_path / "scores.json"
    run("evaluate", model=out / "student", data=files[1], batch_size=2, out=scores, device="cpu")
    assert read_json(scores)["rouge_l"] == report_of(out)["student"]["rouge_l"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2", THINKS)


@pytest.fixture(params=["fast", "slow"])
def reader(folder, request):
    made = AutoTokenizer.from_pretrained(folder)
    made.add_tokens(["<think>", "</think>", "<call>", "assistant", "user", "tool"])
    if request.param == "slow":
        request.getfixturevalue("monkeypatch").setattr(type(made), "is_fast", False)
    return made


def learned(tokenizer, path, **task):
    """The text of a file's one row, and its parts that count."""
    (row,) = encoded(path, TASK(**task), tokenizer, 64)
    words = tokenizer.convert_ids_to_tokens(row["input_ids"])
    counted = [w if x != -100 else "_" for w, x in zip(words, row["labels"], strict=True)]
    return " ".join(words), [part.strip() for part in " ".join(counted).split("_") if part.strip()]


def asked(tokenizer, path, **task):
    """The prompt of `fastkd predict`."""
    rows = read_file(path, replace(TASK.columns, label=None), "--data", True, TASK)
    task, rows, *_ = TASK(**task).prepare(rows, labelled=False)
    found = Encoder(tokenizer, 64, task)(rows)[0]["input_ids"]
    return " ".join(tokenizer.convert_ids_to_tokens(found))


def test_what_a_template_inserts_is_prompt_and_thoughts_are_learned(reader, tmp_path):
    """An empty <think></think> was trained as the answer; two turns were refused."""
    path = write_chats(tmp_path / "a.jsonl", [says("a film", "good", "so", "bad film")])
    text, parts = learned(reader, path)
    assert text == (
        "[CLS] user a film [SEP] [CLS] assistant good [SEP] [CLS] user so [SEP] "
        "[CLS] assistant <think> </think> bad film [SEP]"
    )
    assert parts == ["good [SEP]", "bad film [SEP]"]
    # A prediction has the same prompt as training.
    prompt = asked(reader, path)
    assert prompt == text.removesuffix(" bad film [SEP]")
    (batch,) = encoded(path, TASK(), reader, 64).batches(TASK().collator(reader), 1)
    assert reader.convert_ids_to_tokens(prompts_of(batch)[0]) == prompt.split()
    for own in ("reasoning_content", "content"):  # of the data, of which earlier ones are dropped
        talk = says("a film", "good", "so", "bad")
        for message, thought in ((talk[1], "fine"), (talk[3], "nice")):
            inside = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            message[own] = inside if own == "content" else thought
        text, parts = learned(reader, write_chats(tmp_path / "a.jsonl", [talk]))
        assert "fine" not in text and parts == ["good [SEP]", "<think> nice </think> bad [SEP]"]


THOUGHT = "<think> fine </think> bad [SEP]"


@pytest.mark.left_out(where=lambda x: x["reader"] == "slow")  # of templates: the tests around it
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
def test_thoughts_are_kept_dropped_or_read(reader, tmp_path, template, own, keep, prompt):
    """Whatever the template does with them; `fastkd predict` asks as the training."""
    reader.chat_template = template
    talk = says("so", "bad")
    bare = write_chats(tmp_path / "bare.jsonl", [talk])
    talk[1][own] = "<think>\nfine\n</think>\n\nbad" if own == "content" else "fine"
    path = write_chats(tmp_path / "a.jsonl", [talk])
    question = write_chats(tmp_path / "b.jsonl", [talk[:1]])
    most = {"thoughts": 1.0}
    text, parts = learned(reader, path, **most)
    assert parts == [keep] and text == f"{prompt} {keep}"
    assert asked(reader, path, **most) == prompt
    if own != "content":
        assert asked(reader, question, **most) == prompt
    for thinking in ("drop", "keep"):
        one = learned(reader, path, thinking=thinking)
        assert (one == learned(reader, bare)) == (thinking == "drop")
    end = keep.split()[-1]
    assert learned(reader, path, thinking="prompt") == (text, [f"bad {end}"])
    before = text.removesuffix(f" bad {end}")
    talk[1]["content"] = talk[1]["content"].removesuffix("bad")
    for some in (path, write_chats(tmp_path / "c.jsonl", [talk])):
        assert asked(reader, some, thinking="prompt") == before
    answers = encoded(path, TASK(**most), reader, 64).evaluation_columns["answer"]
    assert answers[:] == ["bad"]


def test_turns_that_end_otherwise_than_the_last_and_headers(reader, tmp_path):
    path = write_chats(tmp_path / "a.jsonl", [says("so", "good", "a", "bad")])
    reader.chat_template = CHANNELS
    assert learned(reader, path)[1] == ["good", "bad [CLS]"]
    reader.chat_template = SHOUTS
    text, parts = learned(reader, path)
    assert parts == ["good [SEP]", "bad [SEP]"]
    assert asked(reader, path) == text.removesuffix(" bad [SEP]")


def test_thoughts_and_answers_that_were_written(reader):
    """ROUGE-L compared thought and answer with the answer alone."""
    ids = reader.convert_tokens_to_ids
    for prompt, written, expected in (
        ("[CLS]", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think>", "fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think> so </think>", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine fine", ("fine fine", "")),
    ):
        assert _written(ids(prompt.split()), ids(written.split()), reader) == expected
    other = copy.deepcopy(reader)
    names = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
    other.add_special_tokens({"additional_special_tokens": list(names)})
    other.add_tokens(["analysis", "final"])
    text = "<|channel|> analysis <|message|> fine <|end|> <|start|> assistant <|channel|> final"
    words = f"{text} <|message|> good [SEP]".split()
    assert _written([2], other.convert_tokens_to_ids(words), other) == ("fine", "good")


def test_a_run_with_thoughts(folder, tiny, tmp_path):
    """And one of ShareGPT's form.

    With answers of its own in every step a student learns from the teacher alone.
    """
    rows = [{"messages": [*says("a film"), {"role": "assistant", "content": w, **more}]}
            for w, more in (("good", {"reasoning_content": "fine"}), ("bad", {"thinking": "poor"}),
                            ("nice", {"reasoning_content": "so"}), ("dull", {}))]  # fmt: skip
    path, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "told.jsonl"
    options = usual(tiny, tmp_path, teacher=folder, train=path, eval=path, method="soft_targets")
    options |= {"max_length": 32, "task": "chat", "max_new_tokens": 4, "on_policy": 1}
    assert "thoughts (--thinking keep): 3 training answers with and 1 without, 3 eval" in run(
        "distill", **options
    )
    student = tmp_path / "out/student"
    assert set(losses_of(tmp_path / "out")) == {"loss", "soft"}
    card = (student / "README.md").read_text()
    assert "`--thinking keep`, in 75% of the training answers" in card
    assert all({"thought", "answer"} <= row.keys() for row in told(student, path, out))
    tasks = [load_trained(str(student), False)[2]]
    asks = {"from": "human", "value": "a film"}
    write_jsonl(path, [{"conversations": [asks, {"from": "gpt", "value": w}]}
                       for w in ("good", "<think>\nfine\n</think>\n\nbad")])  # fmt: skip
    tasks.append(made(**{**options, "thinking": "drop"})[0].data.task)
    assert [(task.thinking, task.thoughts) for task in tasks] == [("keep", 0.75), ("drop", 0.5)]
    options |= {"max_new_tokens": None, "on_policy": None, "task": "causal-lm", "thinking": "drop"}
    error = run("distill", expect=2, **{**options, "out": tmp_path / "no"})
    assert "--thinking drop: rows of --task causal-lm are no conversations" in error


def test_tool_calls_are_learned_and_their_answers_are_not(reader, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "film", "arguments": '{"a": "so"}'}}
    talk = [
        *says("is"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "very good", "tool_call_id": "1"},
        {"role": "assistant", "content": "nice"},
    ]
    path = write_chats(tmp_path / "a.jsonl", [talk])
    assert learned(reader, path)[1] == ["<call> film a so [SEP]", "nice [SEP]"]
    path = write_chats(tmp_path / "b.jsonl", [talk[:2]])
    assert learned(reader, path)[1] == ["<call> film a so [SEP]"]
    answers = encoded(path, TASK(), reader, 64).evaluation_columns["answer"]
    assert answers[:] == ["<call> film a so"]


def messages(tmp_path, *rows):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return [[json.loads(x) for x in kept] for kept in rows_of(path, TASK).column("text")]


def test_forms(tmp_path):
    talk = says("a film", "good", "so", "bad")
    system, developer = ({"role": r, "content": "be fine"} for r in ("system", "developer"))
    share = {"user": "human", "assistant": "gpt"}
    told = [{"from": share[m["role"]], "value": m["content"]} for m in talk]
    alpaca = {"instruction": "so", "input": "", "output": "bad", "system": "be fine"}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "film"}]
    for row, expected in (
        ({"conversations": told}, talk),
        ({"conversations": talk}, talk),
        ({"conversations": told, "system": "be fine"}, [system, *talk]),
        ({"messages": talk, "system": ""}, talk),
        ({"messages": [system, *talk], "system": "no"}, [system, *talk]),
        ({"messages": [developer, *talk], "system": "no"}, [developer, *talk]),
        ({"instruction": "", "input": "so", "output": "bad"}, talk[2:]),
        ({"instruction": "a", "input": "b", "output": "c"}, says("a\n\nb", "c")),
        ({"instruction": "so", "output": "bad"}, talk[2:]),
        ({"instruction": "so", "input": None, "output": "bad"}, talk[2:]),
        # System and history of Alpaca were dropped.
        ({**alpaca, "history": [["a film", "good"]]}, [system, *talk]),
        ({**alpaca, "history": None, "system": None}, talk[2:]),
        ({"prompt": "so", "completion": "bad"}, talk[2:]),
        ({"prompt": talk[:3], "completion": talk[3:]}, talk),
        ({"messages": [{"role": "user", "content": parts}, talk[1]]}, talk[:2]),
    ):
        assert messages(tmp_path, row, row) == [expected, expected]
    call = '{"name": "film", "arguments": {"a": "so"}}'
    calls = [("human", "a"), ("function_call", call), ("observation", "b"), ("gpt", "c")]
    calls = [{"from": name, "value": value} for name, value in calls]
    (found,) = messages(tmp_path, {"conversations": calls, "tools": '[{"name": "film"}]'})
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["tool_calls"][0]["function"] == json.loads(call)
    # Columns by name.
    path = write_jsonl(tmp_path / "rows.jsonl", [{"dialog": talk}])
    named = replace(TASK.columns, text="dialog")
    assert len(read_file(path, named, "--train", task=TASK)) == 1
    write_jsonl(path, [{"q": "so", "a": "bad"}])
    named = replace(TASK.columns, text="q", label="a")
    (kept,) = read_file(path, named, "--train", task=TASK).column("text")
    assert [*map(json.loads, kept)] == talk[2:]


def test_tools_reach_the_template_and_changed_answers_are_refused(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% if tools %}{{ tools[0].name }} {% endif %}" + THINKS
    row = {"messages": says("a", "so"), "tools": [{"name": "film"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert learned(tokenizer, path)[0].startswith("film [CLS]")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }} {% endfor %}"
    write_chats(path, [says("a", "b", "c", "d")])
    assert encoded(path, TASK(), tokenizer)  # each prefix is a prefix of the whole
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(InputError, match=r"put {% generation %} and {% endgeneration %} around"):
        encoded(path, TASK(), tokenizer)
