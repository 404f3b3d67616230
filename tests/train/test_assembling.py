"""Rows and models of `fastkd distill`, without a training."""

import json
import re
import shutil

import pytest
import torch
import transformers as t
from sklearn.metrics import f1_score

from fastkd.models.backbone import Backbone
from fastkd.train.data import describe
from fastkd.train.errors import InputError
from fastkd.train.labels import by_names
from fastkd.train.models import check_same_tokens
from fastkd.train.scoring import judge
from fastkd.train.tasks.classification import Classification
from tests.support.runs import made
from tests.support.tiny import make_teacher, read_otherwise, write_tsv

OWN = "tests.distill.own_method:HiddenAndAttention"
CLASSES = ("single_label_classification", 2)
SWAPPED = ["POSITIVE", "NEGATIVE"]


@pytest.fixture
def ready(tiny):
    """`made` of the tiny teacher and rows; options given here replace the usual ones."""
    rows = dict.fromkeys(("train", "evals"), tiny / "train.tsv")
    usual = {"teacher": tiny / "teacher", **rows, "max_length": 16}
    return lambda **options: made(**{**usual, **options})


def labelled(folder, *words):
    path = write_tsv(folder / f"{'-'.join(map(str, words))}.tsv", label=lambda y: words[y])
    return dict.fromkeys(("train", "evals"), path)


def test_classes_are_matched_by_name(ready, tmp_path):
    """A head named POSITIVE, NEGATIVE was matched to negative, positive by position: swapped."""
    head = make_teacher(tmp_path / "head", SWAPPED)
    rows = labelled(tmp_path, "Negative", "positive")
    run, models = ready(teacher=head, **rows, test=[rows["train"]], metric="f1")
    corpus, both = run.data.corpus, judge(run, models.student)
    assert corpus.names == ["positive", "Negative"]
    # F1 is of the data's second class; the manifest says so to `fastkd evaluate`.
    assert "f1 is that of class 'positive'" in describe(corpus)
    labels = corpus.evals[""].labels
    expected = f1_score(labels, both.answers[""].argmax(-1), pos_label=0)
    assert 0 < both.scores["f1"] == expected
    assert Classification.of(models.student.config, run.data.task.report()).positive == 0
    assert (labels == corpus.train.labels).all() and (labels == corpus.test[""].labels).all()
    assert judge(run, models.student, run.sets.tests).scores == both.scores
    rows = {"teacher": head, **labelled(tmp_path, "bad", "good")}
    assert ready(**rows, label_order="good, bad")[0].data.corpus.names == ["good", "bad"]
    assert ready(**rows, finetune_teacher=1.0)[0].data.corpus.names == ["bad", "good"]
    for names in (["No", "Yes", "NO"], ["No", "perhaps"]):  # a class twice, another one
        assert by_names(["no", "yes"], names) is None


def test_heads_and_weights_of_the_models(ready, tmp_path):
    """Float32 is trained, of the task's kind, whatever a teacher's earlier task left."""
    head = make_teacher(tmp_path / "head", problem_type=CLASSES[0])
    t.AutoModelForSequenceClassification.from_pretrained(head).bfloat16().save_pretrained(head)
    real = {"finetune_teacher": 1.0, **labelled(tmp_path, 0.5, 1.5)}
    for options, kind in (
        ({}, CLASSES), (real, ("regression", 1)),
        ({"student": head, "finetune_teacher": 1.0}, CLASSES),
    ):  # fmt: skip
        _, models = ready(teacher=head, **options)
        for model in (models.student, models.teacher)[: 1 + len(options)]:
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert (model.config.problem_type, model.config.num_labels) == kind
    own = {"method": OWN, "options": {"hidden": 0.25}, "attention": "eager"}
    run, models = ready(**labelled(tmp_path, "no", "yes"), label_order="no,yes", **own)
    assert models.student.config.label2id == {"no": 0, "yes": 1}
    assert models.distiller.method.hidden == 0.25
    # Which answers are useless: tests/train/test_scores.py.
    torch.nn.init.zeros_(models.teacher.classifier.weight)
    models.teacher.classifier.bias.data = torch.tensor([0.0, 5.0])
    judge(run, models.teacher, who="teacher", teacher=True)
    said = "warning: the teacher's answers to the 40 evaluation rows are all 'yes'"
    assert said in run.display.lines


def test_options_that_do_not_fit_are_refused(ready, tiny, tmp_path):
    named, good = labelled(tmp_path, "no", "yes"), labelled(tmp_path, "bad", "good")
    swapped = {"teacher": make_teacher(tmp_path / "swapped", SWAPPED)}
    small, other = (make_teacher(tmp_path / str(n), hidden_size=8, vocab_size=n) for n in (17, 99))
    read_otherwise(small)
    (three := tmp_path / "three.tsv").write_text("sentence\tlabel\n" + "a\t0\nb\t1\nc\t2\n" * 4)
    # Code of a model is not run unasked.
    unsafe = shutil.copytree(tiny / "teacher", tmp_path / "unsafe")
    (unsafe / "code.py").write_text("raise SystemExit('ran')")
    own = {"auto_map": {"AutoConfig": "code.Config", "AutoTokenizer": ["code.T", None]}}
    for file, name in (("config", "model_type"), ("tokenizer_config", "tokenizer_class")):
        (unsafe / f"{file}.json").write_text(json.dumps({**own, name: "unheard_of"}))
    for words, options in (
        # 1 is positive nearly everywhere.
        ("label 0 is the model's class 'POSITIVE' by its number, and 'NEGATIVE'", swapped),
        ("POSITIVE, NEGATIVE, the data bad, good; pass --label-order", {**swapped, **good}),
        ("--label-order good,evil.*bad, good", {**swapped, **good, "label_order": "good,evil"}),
        ("LABEL_0, LABEL_1, the data no, yes; pass --label-order", named),
        ("no head for 3 labels .*--finetune-teacher", {"train": three}),
        ("the labels are numbers, not classes",
         {**labelled(tmp_path, 0.5, 1.5), "finetune_teacher": 1.0, "label_order": "a,b"}),
        ("vocabulary has 99", {"student": other, "method": "lrkd"}),
        ("--max-length 64: the teacher reads at most 32", {"max_length": 64}),
        ("compares attention maps.*; pass --attention eager$", {"method": OWN}),
        *(("--method", {"method": name}) for name in (
            f"{__name__}:Nothing", f"{__name__}:OWN", "no.such:Method")),
        ("--trust-remote-code", {"teacher": unsafe}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            ready(**options)
    with pytest.raises(InputError, match="'so' is token 5 of its tokenizer and 16 of the teacher"):
        check_same_tokens("--student", str(small), t.AutoTokenizer.from_pretrained(other), False)


# How an encoder is selected from, and every family's blocks: tests/distill.
def test_selected_layers_make_the_student_and_are_compared(ready, tiny, tmp_path):
    path = shutil.copytree(tiny / "teacher", tmp_path / "teacher")
    teacher = t.AutoModelForSequenceClassification.from_pretrained(path)
    for name, weight in teacher.named_parameters():
        if re.search(r"\.[12]\.", name):
            weight.data.mul_(1e-3)  # layers 2 and 3 change little
    teacher.save_pretrained(path)
    given = {"teacher": path, "teacher_layers": "select", "method": "mc3kd"}
    run, models = ready(**given)
    assert models.selected == models.distiller.method.teacher_layers == [1, 4]
    assert "teacher layers that differ most: 1, 4" in run.display.lines
    blocks, student = (Backbone(x, "model").blocks for x in (models.teacher, models.student))
    for block, given_block in zip(student, (blocks[0], blocks[3]), strict=True):
        torch.testing.assert_close(block.state_dict(), given_block.state_dict(), rtol=0, atol=0)
    # What methods make of two widths: tests/distill/test_student.py.
    sizes = {"hidden_size": 12, "intermediate_size": 8}
    _, models = ready(**given, options={"layers": "top"}, student_config=sizes)
    assert models.selected == [1, 4] and models.distiller.method.layers == "top"
    assert models.student.bert.encoder.layer[1].intermediate.dense.weight.shape == (8, 12)


def test_students_of_another_length_or_family(ready, tiny, tmp_path):
    short = make_teacher(tmp_path / "short", max_position_embeddings=16)
    run, models = ready(max_length=128, student=short, method="lrkd")
    for who, length in (("teacher", 32), ("student", 16)):
        assert f"--max-length {length}: the {who} reads no more tokens" in run.display.lines
    assert models.max_length == 16 and run.sets.train.lengths.max() <= 16
    # A decoder without padding token, and a student without segments.
    gpt2, student = shutil.copytree(tiny / "teacher", tmp_path / "gpt2"), tmp_path / "student"
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    for config, path in ((t.GPT2Config(**sizes), gpt2), (t.DistilBertConfig(**sizes), student)):
        t.AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    for options in ({"teacher": gpt2, "method": "lrkd"}, {"student": student}):
        run, models = ready(**{"method": "knn", **options})
        batch = next(run.sets.train.batches(run.sets.collate, 8))
        models.distiller.prepare([batch])
        models.distiller(**batch).loss.backward()
        assert models.student.config.pad_token_id == 0
