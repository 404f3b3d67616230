"""`fastkd augment`: seeds, shares, labels, pairs, a stop, and the file as training rows."""

import random

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from fastkd.train import augmentation
from fastkd.train.augmentation import WORD, Augmenter
from tests.support.tiny import make_teacher, run, sentences, write_tsv


@pytest.fixture(scope="module")
def mlm(tmp_path_factory):
    """A random masked model; "films" and "badly" are two tokens of its vocabulary."""
    path = tmp_path_factory.mktemp("mlm") / "bert"
    words = ["good", "fine", "nice", "bad", "poor", "dull", "a", "the", "film", "is", "very", "so"]
    make_teacher(path, words=[*words, "##s", "##ly"], head=False)
    torch.manual_seed(3)
    BertForMaskedLM(BertConfig.from_pretrained(path)).save_pretrained(path)
    return path


@pytest.fixture
def augmenter(mlm):
    tokenizer = AutoTokenizer.from_pretrained(mlm)
    return Augmenter(BertForMaskedLM.from_pretrained(mlm), tokenizer, candidates=3)


def test_share_of_replaced_words(augmenter):
    text = "the film is very good, so nice"
    changed = total = 0
    for copy in augmenter.copies(text, 400, random.Random(0)):
        words, new = WORD.findall(text), WORD.findall(copy)
        assert len(words) == len(new) and "," in copy
        changed += sum(a != b for a, b in zip(words, new, strict=True))
        total += len(words)
    assert abs(changed / total - 0.4) < 5 * (0.24 / total) ** 0.5


def test_candidates_are_the_most_probable_words(augmenter):
    text = "the films is bad"
    spans = [m.span() for m in WORD.finditer(text)]
    found = augmenter._candidates(text, spans)
    tokenizer, model = augmenter.tokenizer, augmenter.model
    ids = tokenizer(text, return_tensors="pt")["input_ids"]  # [CLS] the film ##s is bad [SEP]
    masked = ids.clone()
    masked[0, 5] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = model(input_ids=masked).logits[0, 5]
    whole = [i for i in range(5, 17) if i != ids[0, 5]]
    expected = sorted(whole, key=lambda i: -logits[i])[:3]
    assert found[3] == tokenizer.convert_ids_to_tokens(expected)
    table = model.get_input_embeddings().weight.detach()
    similar = torch.cosine_similarity(table, table[ids[0, 2:4]].mean(0), dim=-1)
    nearest = sorted(range(5, 17), key=lambda i: -similar[i])[:3]
    assert found[1] == tokenizer.convert_ids_to_tokens(nearest)
    assert not {"films", "##s", "[MASK]"} & {w for words in found for w in words}


def test_the_command(mlm, tmp_path):
    data = write_tsv(tmp_path / "train.tsv", 6)
    options = {"data": data, "mlm": mlm, "times": 4, "device": "cpu"}
    run("augment", out=tmp_path / "a.tsv", **options)
    run("augment", out=tmp_path / "b.tsv", **options)
    run("augment", out=tmp_path / "c.tsv", seed=1, **options)
    assert (tmp_path / "a.tsv").read_text() == (tmp_path / "b.tsv").read_text()
    assert (tmp_path / "a.tsv").read_text() != (tmp_path / "c.tsv").read_text()
    header, *lines = [x.split("\t") for x in (tmp_path / "a.tsv").read_text().splitlines()]
    assert header == ["sentence", "label", "row", "augmented"] and len(lines) == 6 * 5
    for i, (text, label) in enumerate(sentences(6, 0)):
        group = lines[5 * i : 5 * i + 5]
        assert group[0][0] == text and [x[1] for x in group] == [str(label)] * 5
        assert [x[3] for x in group] == ["0", "1", "1", "1", "1"]
        assert len({x[2] for x in group}) == 1
    assert "the file exists" in run("augment", out=tmp_path / "a.tsv", expect=2, **options)
    teacher = make_teacher(tmp_path / "teacher")
    run("distill", teacher=teacher, train=tmp_path / "a.tsv", eval=data, epochs=1, method="labels",
        device="cpu", out=tmp_path / "out")  # fmt: skip


def test_pairs_of_a_glue_task(mlm, tmp_path):
    rows = "index\tsentence1\tsentence2\tlabel\n0\tthe film is good\tso bad\tentailment\n"
    (tmp_path / "rte.tsv").write_text(rows)
    run("augment", data=tmp_path / "rte.tsv", task="rte", mlm=mlm, times=3, probability=1,
        out=tmp_path / "out.tsv", device="cpu")  # fmt: skip
    header, *lines = [x.split("\t") for x in (tmp_path / "out.tsv").read_text().splitlines()]
    assert header[:3] == ["sentence1", "sentence2", "label"]
    assert lines[0][:3] == ["the film is good", "so bad", "entailment"]
    for one, two, label, *_ in lines[1:]:
        assert label == "entailment" and len(one.split()) == 4 and len(two.split()) == 2
        assert all(a != b for a, b in zip(one.split(), lines[0][0].split(), strict=True))


def test_a_stopped_command_goes_on(mlm, tmp_path, monkeypatch):
    data = write_tsv(tmp_path / "train.tsv", 6)
    options = {"data": data, "mlm": mlm, "times": 2, "device": "cpu"}
    run("augment", out=tmp_path / "whole.tsv", **options)
    copies, calls = Augmenter.copies, []

    def stopping(self, *rest):
        calls.append(rest)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return copies(self, *rest)

    monkeypatch.setattr(augmentation.Augmenter, "copies", stopping)
    run("augment", out=tmp_path / "a.tsv", expect=130, **options)
    part = tmp_path / "a.tsv.part"
    part.write_text(part.read_text() + "half a li")
    run("augment", out=tmp_path / "a.tsv", **options)
    assert len(calls) == 4 + 3
    assert (tmp_path / "a.tsv").read_text() == (tmp_path / "whole.tsv").read_text()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.tsv", "train.tsv", "whole.tsv"]
