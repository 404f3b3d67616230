"""Rows and models of `fastkd distill`, without a training."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers as t
from sklearn.metrics import f1_score

from fastkd.distill import Method
from fastkd.models.backbone import Backbone
from fastkd.train.data import describe, load
from fastkd.train.errors import InputError
from fastkd.train.loading import in_order_of_head
from fastkd.train.models import check_same_tokens
from fastkd.train.scoring import judge
from fastkd.train.tasks.classification import Classification
from tests.support.runs import made
from tests.support.tiny import make_teacher, read_otherwise, source, write_tsv

SWAPPED = ["POSITIVE", "NEGATIVE"]


@pytest.fixture
def ready(tiny):
    """`made` of the tiny teacher and rows; options given here replace the usual ones."""

    def call(**options):
        rows = dict.fromkeys(("train", "evals"), tiny / "train.tsv")
        usual = {"teacher": tiny / "teacher", **rows, "max_length": 16}
        return made(**{**usual, **options})

    return call


def refused(words, ready, **options):
    with pytest.raises(InputError, match=words):
        ready(**options)


class Halved(Method):
    uses_teacher = False

    def __init__(self, *, share: float = 0.5, name: str = "") -> None:
        super().__init__()
        self.share = share

    def weights(self, progress):
        return {"task": self.share}


def test_a_method_of_ones_own(ready):
    own = f"{__name__}:Halved"
    _, models = ready(method=own, options={"share": 0.25, "name": "x"})
    assert models.distiller.method.share == 0.25
    refused("did you mean 'share'", ready, method=own, options={"shar": 1})
    for name in (f"{__name__}:Nothing", "no.such:Method", f"{__name__}:SWAPPED"):
        refused("--method", ready, method=name)
    own = "tests.distill.own_method:HiddenAndAttention"
    refused("compares attention maps.*; pass --attention eager$", ready, method=own)
    assert ready(method=own, attention="eager")[1].distiller.method.layer_request("student")


def test_classes_are_matched_by_name_or_refused(ready, tmp_path):
    """A head named POSITIVE, NEGATIVE was matched to negative, positive by position: swapped."""
    head = make_teacher(tmp_path / "head", SWAPPED)

    def rows(*words):
        return write_tsv(tmp_path / "rows.tsv", label=lambda y: words[y])

    def names_of(*words, order=None, epochs=0.0):
        path = rows(*words)
        given = source(
            teacher=str(head), train=path, evals=path, label_order=order, finetune_teacher=epochs
        )
        given = type(given)(**{**vars(given), "command": "distill"})
        return in_order_of_head(given, load(given)).names

    path = rows("Negative", "positive")
    run, models = ready(teacher=head, train=path, evals=path, test=[path], metric="f1")
    corpus, both = run.data.corpus, judge(run, models.student)
    assert corpus.names == ["positive", "Negative"]
    # F1 is of the data's second class; the manifest says so to `fastkd evaluate`.
    assert "f1 is that of class 'positive'" in describe(corpus)
    found = [int(i) for i in both.answers[""].argmax(-1)]
    expected = f1_score(corpus.evals[""].labels, found, pos_label=0)
    assert 0 < both.scores["f1"] == expected
    assert Classification.of(models.student.config, run.data.task.report()).positive == 0
    assert {tuple(each.labels) for each in (corpus.test[""], corpus.evals[""], corpus.train)} == {
        tuple(corpus.train.labels)
    }
    assert judge(run, models.student, run.sets.tests).scores == both.scores
    assert names_of("bad", "good", order="good, bad") == ["good", "bad"]
    assert names_of("bad", "good", epochs=1.0) == ["bad", "good"]
    for words, order, said in (
        # 1 is positive nearly everywhere.
        (("0", "1"), None, "label 0 is the model's class 'POSITIVE' by its number, and 'NEGATIVE'"),
        (("bad", "good"), None, "POSITIVE, NEGATIVE, the data bad, good; pass --label-order"),
        (("bad", "good"), "good,evil", "--label-order good,evil.*bad, good"),
    ):
        with pytest.raises(InputError, match=said):
            names_of(*words, order=order)


def test_heads_have_the_tasks_kind_and_names(ready, tmp_path):
    """Whatever problem type a teacher's earlier task left in its configuration."""
    real = write_tsv(tmp_path / "real.tsv", label=lambda y: y + 0.5)
    first = make_teacher(tmp_path / "first", problem_type="single_label_classification")
    _, models = ready(teacher=first, train=real, evals=real, finetune_teacher=1.0)
    for config in (models.student.config, models.teacher.config):
        assert (config.problem_type, config.num_labels) == ("regression", 1)
    named = write_tsv(tmp_path / "b.tsv", label=lambda y: ("no", "yes")[y])
    refused("LABEL_0, LABEL_1, the data no, yes; pass --label-order", ready, train=named,
            evals=named)  # fmt: skip
    _, models = ready(train=named, evals=named, label_order="no,yes")
    assert models.student.config.label2id == {"no": 0, "yes": 1}
    # --label-order helps no head that isn't there.
    bare = make_teacher(tmp_path / "bare", head=False)
    words = f"--teacher {bare}: it has no classification head .*; pass --finetune-teacher"
    refused(words, ready, teacher=bare, train=named, evals=named)
    three = write_tsv(tmp_path / "three.tsv")
    three.write_text(three.read_text() + "dull film\t2\n")
    refused("no head for 3 labels .*--finetune-teacher", ready, train=three)
    refused("the labels are numbers, not classes", ready, train=real, evals=real,
            finetune_teacher=1.0, label_order="a,b")  # fmt: skip


def test_a_student_learns_in_32_bits_whatever_its_teacher_has(ready, tmp_path):
    """A student's weights stay float32: bfloat16 would round small steps away."""
    head = make_teacher(tmp_path / "head")
    model = t.AutoModelForSequenceClassification.from_pretrained(head).bfloat16()
    model.save_pretrained(head)
    for options in ({}, {"student": head, "finetune_teacher": 1.0}):
        _, models = ready(teacher=head, **options)
        trained = [models.student, *([models.teacher] if options else [])]
        assert {p.dtype for model in trained for p in model.parameters()} == {torch.float32}


def test_useless_answers_and_odd_rows_are_printed(ready, tmp_path):
    """Which answers are useless: tests/train/test_scores.py."""
    run, models = ready()
    torch.nn.init.zeros_(models.teacher.classifier.weight)
    models.teacher.classifier.bias.data = torch.tensor([0.0, 5.0])
    assert judge(run, models.teacher, who="teacher", teacher=True).warning == "are all '1'"
    said = "warning: the teacher's answers to the 40 evaluation rows are all '1'"
    assert said in run.display.lines
    odd = write_tsv(tmp_path / "odd.tsv", label=lambda y: ("neg", "pos")[y])
    dev = shutil.copy(odd, tmp_path / "dev.tsv")
    odd.write_text(odd.read_text() + "good film\tpso\n")
    said = "\n".join(describe(load(source(train=odd, evals=Path(dev)))))
    assert "classes, training/evaluation rows: neg 20/20, pos 20/20, pso 1/0" in said
    assert "class 'pso' has a single training row, row 42; is it 'pos', misspelled?" in said
    assert "40 of the 40 evaluation rows are training rows too" in said


def test_code_of_a_model_is_not_run_unasked(ready, tiny, tmp_path):
    own = shutil.copytree(tiny / "teacher", tmp_path / "own")
    (own / "code.py").write_text("raise SystemExit('ran')")
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.T", None]}
    config["model_type"] = "unheard_of"
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": config["auto_map"], "tokenizer_class": "T"})
    )
    refused("--trust-remote-code", ready, teacher=own)


def test_student_from_a_path(ready, tmp_path):
    small = make_teacher(tmp_path / "small", layers=1, hidden_size=8)
    assert ready(student=small, method="lrkd")[1].student.num_parameters() < 3000
    other = make_teacher(tmp_path / "other", vocab_size=99)
    refused("vocabulary has 99", ready, student=other, method="lrkd")
    read_otherwise(small)
    tokenizer = t.AutoTokenizer.from_pretrained(other)
    words = "--student .*: 'so' is token 5 of its tokenizer and 16 of the teacher's"
    with pytest.raises(InputError, match=words):
        check_same_tokens("--student", str(small), tokenizer, False)
    words = "compares tokens, and the student has others than the teacher"
    refused(words, ready, student=small, method="fcd")


def family(path, teacher, kind):
    """A classifier with four unlike layers, and the teacher's tokenizer."""
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = {
        "bert": t.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32),
        "gpt2": t.GPT2Config(vocab_size=17, n_embd=16, n_layer=4, n_head=2, n_positions=32),
    }[kind]
    shutil.copytree(teacher, path)
    torch.manual_seed(2)
    model = t.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"\.[03]\.", name) and weight.dim() == 2:
                weight.mul_(40)  # layers 1 and 4 change what comes in
    model.save_pretrained(path)
    return path


# An encoder is selected from below, and every family's blocks are found in tests/distill.
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_selected_layers_make_the_student_and_are_compared(ready, tiny, tmp_path, kind):
    given = {"teacher": family(tmp_path / kind, tiny / "teacher", kind), "teacher_layers": "select"}
    run, models = ready(**given, method="mc3kd")
    assert models.selected == models.distiller.method.teacher_layers == [1, 4]
    assert "teacher layers that differ most: 1, 4" in run.display.lines
    blocks, student = (Backbone(x, "model").blocks for x in (models.teacher, models.student))
    for i, block in enumerate(student):
        for name, weight in block.named_parameters():
            assert torch.equal(weight, blocks[(0, 3)[i]].get_parameter(name))
    _, models = ready(**given, method="mc3kd", options={"layers": "top"})
    assert models.selected == [1, 4] and models.distiller.method.layers == "top"
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8}
    if kind == "bert":  # what methods make of two widths: tests/distill/test_student.py
        _, models = ready(**given, method="mc3kd", student_config=sizes)
        weight = models.student.get_parameter("bert.encoder.layer.1.intermediate.dense.weight")
        assert weight.shape == (8, 12)
    refused("only 4", ready, **given, student_layers=5)


def test_the_default_length_is_what_the_models_read(ready, tmp_path):
    short = make_teacher(tmp_path / "short", max_position_embeddings=16)
    run, models = ready(max_length=128, student=short, method="lrkd")
    assert run.display.lines[-2:] == [
        "--max-length 32: the teacher reads no more tokens",
        "--max-length 16: the student reads no more tokens",
    ]
    assert models.max_length == 16 and run.sets.train.lengths.max() <= 16
    refused("--max-length 64: the teacher reads at most 32", ready, max_length=64)


def test_a_decoder_without_padding_token_and_a_student_without_segments(ready, tiny, tmp_path):
    gpt2 = shutil.copytree(tiny / "teacher", tmp_path / "gpt2")
    config = t.GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    t.GPT2ForSequenceClassification(config).save_pretrained(gpt2)
    config = t.DistilBertConfig(vocab_size=17, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    t.DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "student")
    for options in ({"teacher": gpt2, "method": "lrkd"}, {"student": tmp_path / "student"}):
        run, models = ready(**{"method": "knn", **options})
        batch = next(run.sets.train.batches(run.sets.collate, 8))
        models.distiller.prepare([batch])
        models.distiller(**batch).loss.backward()
        assert models.student.config.pad_token_id == 0
