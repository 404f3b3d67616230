"""Formats of conversations, and their text by a chat template."""

import copy
import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from fastkd.train.data import Encoder, read_file
from fastkd.train.errors import InputError
from fastkd.train.models import load_trained
from fastkd.train.tasks.chat import TASK, _written, prompts_of
from tests.support.runs import made
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
def folder(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2", THINKS)


@pytest.fixture(params=["fast", "slow"])
def tokenizer(folder, request):
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


def test_what_a_template_inserts_is_prompt_and_thoughts_are_learned(tokenizer, tmp_path):
    """An empty <think></think> was trained as the answer; two turns were refused."""
    path = write_chats(tmp_path / "a.jsonl", [says("a film", "good", "so", "bad film")])
    text, parts = learned(tokenizer, path)
    assert text == (
        "[CLS] user a film [SEP] [CLS] assistant good [SEP] [CLS] user so [SEP] "
        "[CLS] assistant <think> </think> bad film [SEP]"
    )
    assert parts == ["good [SEP]", "bad film [SEP]"]
    # The prompt of a prediction is that of the training.
    prompt = asked(tokenizer, path)
    assert prompt == text.removesuffix(" bad film [SEP]")
    (batch,) = encoded(path, TASK(), tokenizer, 64).batches(TASK().collator(tokenizer), 1)
    assert tokenizer.convert_ids_to_tokens(prompts_of(batch)[0]) == prompt.split()
    for own in ("reasoning_content", "content"):  # of the data, of which earlier ones are dropped
        talk = says("a film", "good", "so", "bad")
        for message, thought in ((talk[1], "fine"), (talk[3], "nice")):
            inside = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            message[own] = inside if own == "content" else thought
        text, parts = learned(tokenizer, write_chats(tmp_path / "a.jsonl", [talk]))
        assert "fine" not in text and parts == ["good [SEP]", "<think> nice </think> bad [SEP]"]


THOUGHT = "<think> fine </think> bad [SEP]"


@pytest.mark.left_out(where=lambda x: x["tokenizer"] == "slow" and x["own"] != "content")
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
def test_thoughts_are_kept_dropped_or_read(tokenizer, tmp_path, template, own, keep, prompt):
    """Whatever the template does with them; `fastkd predict` asks as the training."""
    tokenizer.chat_template = template
    talk = says("so", "bad")
    bare = write_chats(tmp_path / "bare.jsonl", [talk])
    talk[1][own] = "<think>\nfine\n</think>\n\nbad" if own == "content" else "fine"
    path = write_chats(tmp_path / "a.jsonl", [talk])
    question = write_chats(tmp_path / "b.jsonl", [talk[:1]])
    most = {"thoughts": 1.0}
    text, parts = learned(tokenizer, path, **most)
    assert parts == [keep] and text == f"{prompt} {keep}"
    assert asked(tokenizer, path, **most) == prompt
    if own != "content":
        assert asked(tokenizer, question, **most) == prompt
    for thinking in ("drop", "keep"):
        one = learned(tokenizer, path, thinking=thinking)
        assert (one == learned(tokenizer, bare)) == (thinking == "drop")
    end = keep.split()[-1]
    assert learned(tokenizer, path, thinking="prompt") == (text, [f"bad {end}"])
    before = text.removesuffix(f" bad {end}")
    talk[1]["content"] = talk[1]["content"].removesuffix("bad")
    for some in (path, write_chats(tmp_path / "c.jsonl", [talk])):
        assert asked(tokenizer, some, thinking="prompt") == before
    answers = encoded(path, TASK(**most), tokenizer, 64).evaluation_columns["answer"]
    assert answers[:] == ["bad"]


def test_turns_that_end_otherwise_than_the_last_and_headers(tokenizer, tmp_path):
    path = write_chats(tmp_path / "a.jsonl", [says("so", "good", "a", "bad")])
    tokenizer.chat_template = CHANNELS
    assert learned(tokenizer, path)[1] == ["good", "bad [CLS]"]
    tokenizer.chat_template = SHOUTS
    text, parts = learned(tokenizer, path)
    assert parts == ["good [SEP]", "bad [SEP]"]
    assert asked(tokenizer, path) == text.removesuffix(" bad [SEP]")


def test_thoughts_and_answers_that_were_written(tokenizer):
    """ROUGE-L compared thought and answer with the answer alone."""
    ids = tokenizer.convert_tokens_to_ids
    for prompt, written, expected in (
        ("[CLS]", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think>", "fine </think> good [SEP]", ("fine", "good")),
        ("[CLS] <think> so </think>", "good [SEP]", ("", "good")),
        ("[CLS]", "<think> fine fine", ("fine fine", "")),
    ):
        assert _written(ids(prompt.split()), ids(written.split()), tokenizer) == expected
    other = copy.deepcopy(tokenizer)
    names = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
    other.add_special_tokens({"additional_special_tokens": list(names)})
    other.add_tokens(["analysis", "final"])
    text = "<|channel|> analysis <|message|> fine <|end|> <|start|> assistant <|channel|> final"
    words = f"{text} <|message|> good [SEP]".split()
    assert _written([2], other.convert_tokens_to_ids(words), other) == ("fine", "good")


def test_a_run_with_thoughts(folder, tiny, tmp_path):
    """And one of ShareGPT's form."""
    rows = [{"messages": [*says("a film"), {"role": "assistant", "content": w, **more}]}
            for w, more in (("good", {"reasoning_content": "fine"}), ("bad", {"thinking": "poor"}),
                            ("nice", {"reasoning_content": "so"}), ("dull", {}))]  # fmt: skip
    path, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "told.jsonl"
    options = usual(tiny, tmp_path, teacher=folder, train=path, eval=path, method="soft_targets")
    options |= {"max_length": 32, "task": "chat", "max_new_tokens": 4}
    assert "thoughts (--thinking keep): 3 training answers with and 1 without, 3 eval" in run(
        "distill", **options
    )
    student = tmp_path / "out/student"
    card = (student / "README.md").read_text()
    assert "`--thinking keep`, in 75% of the training answers" in card
    assert all({"thought", "answer"} <= row.keys() for row in told(student, path, out))
    tasks = [load_trained(str(student), False)[2]]
    asks = {"from": "human", "value": "a film"}
    write_jsonl(path, [{"conversations": [asks, {"from": "gpt", "value": w}]}
                       for w in ("good", "<think>\nfine\n</think>\n\nbad")])  # fmt: skip
    tasks.append(made(**{**options, "thinking": "drop"})[0].data.task)
    assert [(task.thinking, task.thoughts) for task in tasks] == [("keep", 0.75), ("drop", 0.5)]
    options |= {"max_new_tokens": None, "task": "causal-lm", "thinking": "drop"}
    error = run("distill", expect=2, **{**options, "out": tmp_path / "no"})
    assert "--thinking drop: rows of --task causal-lm are no conversations" in error


def test_tool_calls_are_learned_and_their_answers_are_not(tokenizer, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "film", "arguments": '{"a": "so"}'}}
    talk = [
        *says("is"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "very good", "tool_call_id": "1"},
        {"role": "assistant", "content": "nice"},
    ]
    path = write_chats(tmp_path / "a.jsonl", [talk])
    assert learned(tokenizer, path)[1] == ["<call> film a so [SEP]", "nice [SEP]"]
    path = write_chats(tmp_path / "b.jsonl", [talk[:2]])
    assert learned(tokenizer, path)[1] == ["<call> film a so [SEP]"]
    answers = encoded(path, TASK(), tokenizer, 64).evaluation_columns["answer"]
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
