"""--lora: trained and saved weights, and errors; tests/train/tasks/test_chat.py resumes."""

import pytest
import torch
import transformers as t
from peft import PeftModel
from safetensors.torch import load_file

from fastkd.models.inputs import accepted
from fastkd.train import lora
from fastkd.train.errors import InputError
from fastkd.train.saving import read_json
from tests.support.runs import crash, stop_at
from tests.support.tiny import make_teacher, run, write_tsv
from tests.train.tasks.test_chat import make_chat_teacher, talks, write_jsonl
from tests.train.tasks.through import verified

WEIGHTS = "model.safetensors"
DEFAULTS = {"epochs": 2, "batch_size": 4, "max_length": 16, "device": "cpu", "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    files = [write_jsonl(folder / f"{i}.jsonl", talks(12, i)) for i in range(2)]
    options = {"task": "chat", "train": files[0], "eval": files[1], "method": "soft_targets"}
    teacher = make_chat_teacher(folder / "gpt2")
    return {**DEFAULTS, **options, "teacher": teacher, "lora": "r=2,alpha=4"}


def test_adapters_learn_and_are_saved_beside_their_sum(chat, tmp_path, monkeypatch):
    run("distill", **chat, out=tmp_path / "out", log_json=tmp_path / "log")
    student = tmp_path / "out/student"
    config = read_json(student / "adapter/adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert config["base_model_name_or_path"] == ""
    # Into the teacher's layers, of which the student is made, the adapters give the student.
    run("cache", **{k: v for k, v in chat.items() if k not in ("epochs", "learning_rate", "lora")},
        out=tmp_path / "cache")  # fmt: skip
    base = t.AutoModelForCausalLM.from_pretrained(tmp_path / "cache/student")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = t.AutoModelForCausalLM.from_pretrained(student)
    changed = {n for n, x in merged.state_dict().items() if not torch.equal(x, before[n])}
    assert changed and all(".c_" in name and "weight" in name for name in changed)
    both = PeftModel.from_pretrained(base, student / "adapter").eval()
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(both(ids).logits, merged.eval()(ids).logits)
    # The student's card has the code of such a base.
    code = (student / "README.md").read_text().split("```python\n")[2].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    made: dict = {}
    exec(code, made)
    torch.testing.assert_close(made["model"].eval()(ids).logits, both(ids).logits)
    run("evaluate", model=student, data=chat["eval"], out=tmp_path / "scores.json", device="cpu")
    report = read_json(student / "fastkd.json")
    assert report["parameters"]["student"] == sum(p.numel() for p in merged.parameters())
    said = read_json(tmp_path / "scores.json")["perplexity"]
    assert said == pytest.approx(report["best"]["scores"]["perplexity"], rel=1e-5)
    verified(**{k: v for k, v in chat.items() if k not in DEFAULTS}, max_length=16, device="cpu")


def test_a_classifier_trains_its_head_too(tmp_path):
    """The adapters' card names the given teacher, not the fine-tuned one."""
    rows = write_tsv(tmp_path / "a.tsv")
    teacher = make_teacher(tmp_path / "bert", layers=2, head=False)
    options = {**DEFAULTS, "epochs": 1, "finetune_teacher": 1, "lora": "r=2,targets=query+value"}
    run("distill", **options, train=rows, eval=rows, teacher=teacher, out=tmp_path / "out")
    adapter = tmp_path / "out/student/adapter"
    kept = load_file(adapter / "adapter_model.safetensors")
    assert any("classifier" in name for name in kept) and any("query" in name for name in kept)
    assert f"base_model: {teacher}\n" in (adapter / "README.md").read_text()


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


@pytest.mark.parametrize("targets", ["all-linear", "query+value"])
@pytest.mark.parametrize(("kind", "config"), [
    ("MultipleChoice", t.BertConfig(**SMALL, intermediate_size=32)),
    ("SequenceClassification", t.RobertaConfig(**SMALL, intermediate_size=32)),
    ("SequenceClassification", t.XLNetConfig(**SMALL, d_head=8, d_inner=32)),
    ("SequenceClassification", t.DistilBertConfig(**SMALL, hidden_dim=32)),
])  # fmt: skip
def test_all_of_a_classifiers_head_learns(kind, config, targets):
    """Head and pooler train under any module name; in the body only adapters train."""
    name = f"AutoModelFor{kind}"
    student = getattr(t, name).from_config(config)
    if targets != "all-linear":
        by_kind = {"xlnet": "layer_1+layer_2", "distilbert": "q_lin+v_lin"}
        targets = by_kind.get(config.model_type, targets)
    body = f"{student.base_model_prefix}."
    heads = {
        x.data_ptr()
        for n, x in student.named_parameters()  # the pooler too: many are published without it
        if not n.startswith(body) or n.startswith(f"{body}pooler")
    }
    model = lora.adapted(student, {"targets": targets}, name, None)
    learns = {n for n, x in model.named_parameters() if x.requires_grad}
    parts = [n for n in learns if "lora_" not in n]
    assert len(parts) == len(heads) and all("modules_to_save" in n for n in parts)
    assert all(f".{body}" in n for n in learns.difference(parts))
    assert learns != set(parts)


@pytest.mark.parametrize("name", [*lora.TRAINED, "AutoModelForMaskedLM", "AutoModel"])
def test_adapters_change_nothing_before_training(name):
    """Token types reach the model in evaluation too, through PEFT's wrappers of every task."""
    torch.manual_seed(0)
    config = t.BertConfig(**SMALL, intermediate_size=32, initializer_range=0.5)
    student = getattr(t, name).from_config(config).eval()
    shape = (2, 3, 6) if name.endswith("MultipleChoice") else (2, 6)
    batch = {"input_ids": torch.randint(5, 20, shape)}
    batch["token_type_ids"] = (batch["input_ids"] % 2).long()
    expected = student(**batch)[0]
    adapted = lora.adapted(student, {"r": 2}, name, None).eval()
    assert torch.equal(adapted(**accepted(adapted, batch))[0], expected)


def test_a_mistake_is_one_sentence():
    for given, words in (
        ({"rank": 4}, "--lora rank: known: r, alpha, targets, dropout"),
        ({"r": 0}, "--lora r=0: must be a whole number above 0"),
        ({"r": 4, "alpha": "x"}, "--lora alpha=x: must be a number, at least 0"),
        ({"dropout": 1}, "--lora dropout=1: must be a number, at least 0 and below 1"),
    ):
        with pytest.raises(InputError, match=words):
            lora.read(given, "--lora")


def test_what_no_adapter_could_make_is_refused(chat, tmp_path):
    """A random head, a random student, and layers that are not there."""
    teacher, student = (make_teacher(tmp_path / name, head=False) for name in ("a", "b"))
    config = t.BertConfig.from_pretrained(teacher)
    t.BertForMaskedLM(config).save_pretrained(teacher)
    few = {**chat, "task": "masked-lm", "teacher": teacher, "student": student}
    for name in ("train", "eval"):
        few[name] = tmp_path / f"{name}.txt"
        few[name].write_text("good film\n\nbad film\n")
    for options, words in (
        (few, "it has no language model head (cls."),
        (few, "adapters alone learn"),
        ({**chat, "student_weights": "random"}, "--lora and --student-weights random"),
        ({**chat, "lora": "targets=nothing"}, "--lora: Target modules"),
    ):
        assert words in run("distill", **options, out=tmp_path / "out", expect=2)


def test_adapters_of_a_teacher(chat, tmp_path, monkeypatch):
    """Merged into the saved teacher, which alone teaches; the same bits after a stop."""
    options = {
        **chat, "epochs": 1, "finetune_teacher": 1, "teacher_lora": "r=2", "checkpoint_every": 1,
        "teacher_learning_rate": 1e-2, "max_new_tokens": 3,
    }  # fmt: skip
    run("distill", **options, out=tmp_path / "whole")
    teacher = tmp_path / "whole/teacher"
    given, merged = (t.AutoModelForCausalLM.from_pretrained(x) for x in (chat["teacher"], teacher))
    before = given.state_dict()
    changed = {n for n, x in merged.state_dict().items() if not torch.equal(x, before[n])}
    assert changed and all(".c_" in name and "weight" in name for name in changed)
    both = PeftModel.from_pretrained(given, teacher / "adapter").eval()
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(both(ids).logits, merged.eval()(ids).logits)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, crash)  # of the teacher's three steps
        run("distill", **options, out=tmp_path / "out", expect=130)
    assert not (tmp_path / "out/unfinished/student").exists()
    run("distill", "--resume", **options, out=tmp_path / "out")
    for name in ("teacher", "student"):
        one, other = (load_file(tmp_path / x / name / WEIGHTS) for x in ("whole", "out"))
        assert all(torch.equal(one[key], other[key]) for key in one), name
    for wrong, words in (
        ({"teacher_lora": "r=0"}, "--teacher-lora r=0"),
        ({"finetune_teacher": None, "teacher_learning_rate": None},
         "--teacher-lora needs --finetune-teacher EPOCHS"),
    ):  # fmt: skip
        assert words in run("distill", **{**options, **wrong}, out=tmp_path / "no", expect=2)
