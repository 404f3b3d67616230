"""`fastkd augment`: seeds, shares, labels, pairs, a stop, and the file as training rows."""

import random

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from fastkd.train.augmentation import WORD, Augmenter
from fastkd.train.data import load
from tests.support.tiny import WORDS, make_teacher, run, sentences, source, write_tsv


@pytest.fixture(scope="module")
def mlm(tmp_path_factory):
    """A random masked model; "films" and "badly" are two tokens of its vocabulary."""
    path = tmp_path_factory.mktemp("mlm") / "bert"
    make_teacher(path, words=[*WORDS, "##s", "##ly"], head=False)
    torch.manual_seed(3)
    BertForMaskedLM(BertConfig.from_pretrained(path)).save_pretrained(path)
    return path


@pytest.fixture
def augment(mlm, tmp_path):
    """The lines of `fastkd augment`, split."""

    def augment(name, **options):
        out = tmp_path / name
        said = run("augment", out=out, **{"mlm": mlm, "device": "cpu", **options})
        if options.get("expect"):
            return said
        return [line.split("\t") for line in out.read_text().splitlines()]

    return augment


def test_words_that_are_replaced_and_their_candidates(mlm):
    tokenizer, model = AutoTokenizer.from_pretrained(mlm), BertForMaskedLM.from_pretrained(mlm)
    augmenter = Augmenter(model, tokenizer, candidates=3)
    changed = total = 0
    for copy in augmenter.copies("the film is very good, so nice", 400, random.Random(0)):
        words, new = WORD.findall("the film is very good, so nice"), WORD.findall(copy)
        assert len(words) == len(new) and "," in copy
        changed += sum(a != b for a, b in zip(words, new, strict=True))
        total += len(words)
    assert abs(changed / total - 0.4) < 5 * (0.24 / total) ** 0.5
    text = "the films is bad"
    found = augmenter._candidates(text, [m.span() for m in WORD.finditer(text)])
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


def test_the_command_also_after_a_stop(augment, tmp_path, monkeypatch):
    data = write_tsv(tmp_path / "train.tsv", 6)
    whole = augment("a.tsv", data=data, times=4)
    assert whole != augment("c.tsv", data=data, times=4, seed=1)
    header, *lines = whole
    assert header == ["sentence", "label", "row", "augmented"] and len(lines) == 6 * 5
    for i, (text, label) in enumerate(sentences(6, 0)):
        group = lines[5 * i : 5 * i + 5]
        assert group[0][0] == text and [x[1] for x in group] == [str(label)] * 5
        assert [x[3] for x in group] == ["0", "1", "1", "1", "1"]
        assert len({x[2] for x in group}) == 1
    assert "the file exists" in augment("a.tsv", data=data, expect=2)
    augmented = source(train=tmp_path / "a.tsv", evals=data)
    assert len(load(augmented).train) == 6 * 5
    copies, calls = Augmenter.copies, []

    def stopping(self, *rest):
        calls.append(rest)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return copies(self, *rest)

    monkeypatch.setattr(Augmenter, "copies", stopping)
    augment("b.tsv", data=data, times=4, expect=130)
    part = tmp_path / "b.tsv.part"
    part.write_text(part.read_text() + "half a li")
    assert augment("b.tsv", data=data, times=4) == whole
    assert len(calls) == 4 + 3 and not part.exists()


def test_pairs_of_a_glue_task(augment, tmp_path):
    rows = "index\tsentence1\tsentence2\tlabel\n0\tthe film is good\tso bad\tentailment\n"
    (tmp_path / "rte.tsv").write_text(rows)
    given = {"data": tmp_path / "rte.tsv", "task": "rte", "times": 3, "probability": 1}
    header, *lines = augment("out.tsv", **given)
    assert header[:3] == ["sentence1", "sentence2", "label"]
    assert lines[0][:3] == ["the film is good", "so bad", "entailment"]
    for one, two, label, *_ in lines[1:]:
        assert label == "entailment" and len(one.split()) == 4 and len(two.split()) == 2
        assert all(a != b for a, b in zip(one.split(), lines[0][0].split(), strict=True))
