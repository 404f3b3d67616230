"""--lora: trained and saved weights, a run that is stopped and resumed, and errors."""

import pytest
import torch
import transformers as t
from peft import PeftModel
from safetensors.torch import load_file

from fastkd.distill import student_from_teacher
from fastkd.models.inputs import accepted
from fastkd.train import lora
from fastkd.train.saving import read_json
from fastkd.train.tasks.chat import TASK
from tests.support.runs import report_of
from tests.support.tiny import usual
from tests.train.tasks.through import killed_and_resumed, make_chat_teacher, verified, write_chats

IDS = torch.arange(12).view(2, 6)


@pytest.fixture
def chat(tmp_path):
    files = [write_chats(tmp_path / f"{i}.jsonl", 12, i) for i in range(2)]
    options = {"task": "chat", "train": files[0], "eval": files[1], "method": "soft_targets"}
    options |= {"teacher": make_chat_teacher(tmp_path / "gpt2"), "lora": "r=2,alpha=4"}
    return usual(tmp_path, tmp_path, **options, epochs=2, batch_size=4, learning_rate=1e-2)


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


def test_adapters_learn_are_saved_beside_their_sum_and_resume(chat, tmp_path, monkeypatch):
    """Those of both; the student writes in half of its steps, on packed rows.

    The teacher's adapters are merged into the saved teacher, which alone teaches.
    """
    steps, draw = [], TASK.generated

    def noted(self, model, batch, tokenizer, seed):
        rows = draw(self, model, batch, tokenizer, seed)
        steps.append([row["input_ids"] for row in rows])
        return rows

    monkeypatch.setattr(TASK, "generated", noted)
    options = {
        **chat, "finetune_teacher": 1, "teacher_lora": "r=2", "teacher_learning_rate": 1e-2,
        "max_new_tokens": 4, "on_policy": 0.5, "pack": True, "batch_size": 2,
    }  # fmt: skip
    del options["out"]
    killed_and_resumed(tmp_path, 2, 7, **options)  # the teacher has five steps
    out, report = tmp_path / "whole", report_of(tmp_path / "whole")
    drawn = report["history"][-1]["step"] // 2
    assert report["rows"]["train"] < 10 and drawn > 2 and steps[-1] == steps[drawn - 1]
    teachers = (tmp_path / x / "teacher/model.safetensors" for x in ("whole", "killed"))
    one, other = map(load_file, teachers)
    assert all(torch.equal(one[key], other[key]) for key in one)
    given, teacher, student = (
        t.AutoModelForCausalLM.from_pretrained(x).eval()
        for x in (chat["teacher"], out / "teacher", out / "student")
    )
    base = student_from_teacher(teacher, report["teacher_layers"])
    for name, before, after in (("teacher", given, teacher), ("student", base, student)):
        weights = {key: x.clone() for key, x in before.state_dict().items()}
        changed = [key for key, x in after.state_dict().items() if not torch.equal(x, weights[key])]
        assert changed and all(".c_" in key and "weight" in key for key in changed)
        both = PeftModel.from_pretrained(before, out / name / "adapter").eval()
        torch.testing.assert_close(both(IDS).logits, after(IDS).logits)
    config = read_json(out / "student/adapter/adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert config["base_model_name_or_path"] == ""
    assert report["parameters"]["student"] == sum(p.numel() for p in student.parameters())
    # The given teacher, not the fine-tuned one.
    card = (out / "student/adapter/README.md").read_text()
    assert f"base_model: {chat['teacher']}\n" in card
    # The student's card has the code of its base.
    code = (out / "student/README.md").read_text().split("```python\n")[2].split("```")[0]
    monkeypatch.chdir(out)
    made: dict = {}
    exec(code, made)
    torch.testing.assert_close(made["model"].eval()(IDS).logits, student(IDS).logits)
    left = ("task", "train", "eval", "teacher", "lora", "max_length", "method", "device")
    verified(**{name: chat[name] for name in left})
