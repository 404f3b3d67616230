"""--lora: trained and saved weights, a run that is stopped and resumed, and errors."""

import pytest
import torch
import transformers as t
from peft import PeftModel

from fastkd.distill import student_from_teacher
from fastkd.models.inputs import accepted
from fastkd.train import lora
from fastkd.train.saving import read_json
from tests.support.runs import report_of
from tests.train.tasks.through import killed_and_resumed, make_chat_teacher, verified, write_chats

IDS = torch.arange(12).view(2, 6)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
BERT = t.BertConfig(**SMALL, intermediate_size=32, initializer_range=0.5)
CLASSIFIER = "AutoModelForSequenceClassification"


@pytest.mark.parametrize(("name", "config", "targets"), [
    *((name, BERT, "query+value") for name in (*lora.TRAINED, "AutoModelForMaskedLM", "AutoModel")),
    (CLASSIFIER, t.RobertaConfig(**SMALL, intermediate_size=32), "query+value"),
    (CLASSIFIER, t.XLNetConfig(**SMALL, d_head=8, d_inner=32), "layer_1+layer_2"),
    (CLASSIFIER, t.DistilBertConfig(**SMALL, hidden_dim=32), "q_lin+v_lin"),
])  # fmt: skip
def test_adapters_change_nothing_and_all_of_a_classifiers_head_learns(name, config, targets):
    """Token types reach the model through PEFT's wrappers; heads and poolers have any names."""
    ids = torch.randint(5, 20, (2, 3, 6) if name.endswith("MultipleChoice") else (2, 6))
    batch = {"input_ids": ids, "token_type_ids": (ids % 2 * (config is BERT)).long()}
    for given in ("all-linear", targets):
        student = getattr(t, name).from_config(config).eval()
        expected, body = student(**accepted(student, batch))[0], f"{student.base_model_prefix}."
        heads = [n for n, _ in student.named_parameters() if not n.startswith(body)]
        heads += [n for n, _ in student.named_parameters() if n.startswith(f"{body}pooler")]
        model = lora.adapted(student, {"r": 2, "targets": given}, name, None).eval()
        assert torch.equal(model(**accepted(model, batch))[0], expected)
        learns = {n for n, x in model.named_parameters() if x.requires_grad}
        parts = {n for n in learns if "lora_" not in n}
        assert len(parts) == len(heads) * (name in lora.TRAINED) and learns != parts
        assert all("modules_to_save" in n for n in parts)
        assert name not in lora.TRAINED or all(f".{body}" in n for n in learns - parts)


def test_adapters_learn_are_saved_beside_their_sum_and_resume(tmp_path, monkeypatch):
    """Those of both; the student writes in half of its steps, on packed rows."""
    train, evals = (write_chats(tmp_path / f"{i}.jsonl", 12, i) for i in range(2))
    options = {
        "task": "chat", "train": train, "eval": evals, "method": "soft_targets",
        "teacher": make_chat_teacher(tmp_path / "gpt2"), "lora": "r=2,alpha=4",
    }  # fmt: skip
    killed_and_resumed(
        tmp_path, 2, 7, **options, epochs=2, learning_rate=1e-2, finetune_teacher=1, batch_size=2,
        teacher_lora="r=2", teacher_learning_rate=1e-2, max_new_tokens=4, on_policy=0.5, pack=True,
    )  # fmt: skip
    out, report = tmp_path / "whole", report_of(tmp_path / "whole")
    assert report["rows"]["train"] < 10
    paths = options["teacher"], out / "teacher", out / "student"
    given, teacher, student = (t.AutoModelForCausalLM.from_pretrained(x).eval() for x in paths)
    base = student_from_teacher(teacher, report["teacher_layers"])
    for name, before, after in (("teacher", given, teacher), ("student", base, student)):
        weights = {key: x.clone() for key, x in before.state_dict().items()}
        changed = [key for key, x in after.state_dict().items() if not torch.equal(x, weights[key])]
        assert changed and all(".c_" in key and "weight" in key for key in changed)
        both = PeftModel.from_pretrained(before, out / name / "adapter").eval()
        torch.testing.assert_close(both(IDS).logits, after(IDS).logits)
    config = read_json(out / "student/adapter/adapter_config.json")
    assert config.items() >= {"r": 2, "lora_alpha": 4, "base_model_name_or_path": ""}.items()
    assert report["parameters"]["student"] == sum(p.numel() for p in student.parameters())
    assert f"base_model: {paths[0]}\n" in (out / "student/adapter/README.md").read_text()
    # The student's card has the code of its base, which is made of the given teacher.
    code = (out / "student/README.md").read_text().split("```python\n")[2].split("```")[0]
    monkeypatch.chdir(out)
    exec(code, made := {})
    torch.testing.assert_close(made["model"].eval()(IDS).logits, student(IDS).logits)
    verified(**options, max_length=16, device="cpu")
