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


def test_words_that_are_replaced_and_their_candidates(mlm):
    tokenizer, model = AutoTokenizer.from_pretrained(mlm), BertForMaskedLM.from_pretrained(mlm)
    augmenter = Augmenter(model, tokenizer, candidates=3)
    text = "the film is very good, so nice"
    changed = []
    for copy in augmenter.copies(text, 400, random.Random(0)):
        assert "," in copy
        changed += [a != b for a, b in zip(WORD.findall(text), WORD.findall(copy), strict=True)]
    assert abs(sum(changed) / len(changed) - 0.4) < 5 * (0.24 / len(changed)) ** 0.5
    text = "the films is bad"
    found = augmenter._candidates(text, [m.span() for m in WORD.finditer(text)])
    masked = tokenizer(text, return_tensors="pt")["input_ids"]  # [CLS] the film ##s is bad [SEP]
    ids = masked[0].tolist()
    masked[0, 5] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = model(input_ids=masked).logits[0, 5]
    table = model.get_input_embeddings().weight.detach()
    similar = torch.cosine_similarity(table, table[ids[2:4]].mean(0), dim=-1)
    for word, scores, own in ((3, logits, ids[5]), (1, similar, None)):
        best = sorted((i for i in range(5, 17) if i != own), key=lambda i: -scores[i])[:3]
        assert found[word] == tokenizer.convert_ids_to_tokens(best)
    assert not {"films", "##s", "[MASK]"} & {w for words in found for w in words}


def test_the_command_also_after_a_stop(mlm, tmp_path, monkeypatch):
    data = write_tsv(tmp_path / "train.tsv", 6)

    def augment(name, **options):
        given = {"mlm": mlm, "device": "cpu", "data": data, "times": 4, **options}
        said = run("augment", out=tmp_path / name, **given)
        if options.get("expect"):
            return said
        return [line.split("\t") for line in (tmp_path / name).read_text().splitlines()]

    whole = augment("a.tsv")
    assert whole != augment("c.tsv", seed=1)
    header, *lines = whole
    assert header == ["sentence", "label", "row", "augmented"] and len(lines) == 6 * 5
    for i, (text, label) in enumerate(sentences(6, 0)):
        texts, labels, rows, augmented = zip(*lines[5 * i : 5 * i + 5], strict=True)
        assert texts[0] == text and {*labels} == {str(label)} and len({*rows}) == 1
        assert augmented == ("0", "1", "1", "1", "1")
    assert "the file exists" in augment("a.tsv", expect=2)
    assert len(load(source(train=tmp_path / "a.tsv", evals=data)).train) == 6 * 5
    copies, calls = Augmenter.copies, []

    def stopping(self, *rest):
        calls.append(rest)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return copies(self, *rest)

    monkeypatch.setattr(Augmenter, "copies", stopping)
    augment("b.tsv", expect=130)
    part = tmp_path / "b.tsv.part"
    part.write_text(part.read_text() + "half a li")
    assert augment("b.tsv") == whole
    assert len(calls) == 4 + 3 and not part.exists()

    data.write_text("index\tsentence1\tsentence2\tlabel\n0\tthe film is good\tso bad\tentailment\n")
    header, first, *lines = augment("rte.tsv", task="rte", times=3, probability=1)
    assert header[:3] == ["sentence1", "sentence2", "label"]
    assert first[:3] == ["the film is good", "so bad", "entailment"]
    for one, two, label, *_ in lines:
        assert label == "entailment" and len(two.split()) == 2
        assert all(a != b for a, b in zip(one.split(), first[0].split(), strict=True))
