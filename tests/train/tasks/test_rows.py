"""Tokens of rows, scores of answers and losses of lists, of tasks that are unlike others.

Documents of language models, masked tokens, windows around answers, tags of words, and documents in
an order of relevance.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

from fastkd.distill import Distiller, SoftTargets
from fastkd.distill.baselines import MarginMSE
from fastkd.train.arrow_rows import PROBABILITIES, UNLABELLED
from fastkd.train.data import load
from fastkd.train.errors import InputError
from fastkd.train.scoring import score
from fastkd.train.tasks import named
from fastkd.train.tasks.causal_lm import _token_bytes, _with_offsets
from fastkd.train.tasks.reranking import _ranked
from tests.distill.models import classifier
from tests.support.tiny import source
from tests.train.tasks.through import drawn, encoded, make_decoder, rows_of, write_squad, write_text

NAMES = ("causal-lm", "masked-lm", "question-answering", "token-classification")
CAUSAL, MASKED, SPANS, TAGS = map(named, NAMES)
BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def byte_level(blank, **options):
    """A tokenizer of single bytes, which adds a blank before the first word, or not."""
    made = Tokenizer(models.BPE(BYTES, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    return t.PreTrainedTokenizerFast(tokenizer_object=made, add_prefix_space=blank, **options)


@pytest.fixture
def tokenizer(tiny):
    return t.AutoTokenizer.from_pretrained(tiny / "teacher")


def test_documents_are_packed_and_their_bytes_counted(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    rows = rows_of(path, CAUSAL, "good  film\nis\n\n\nbad film\n")
    assert list(rows.columns("number", "text")) == [(1, "good  film\nis"), (5, "bad film")]
    tokens = encoded(path, CAUSAL(), tokenizer, 4)
    end = tokenizer.sep_token
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in tokens.tokens["input_ids"]]
    assert words == [["good", "film", "is", end], ["bad", "film", end]]
    assert tokens.evaluation_columns["bytes"][:] == [len("  film\nis"), len(" film")]
    assert [tokens.source_of(i)[1] for i in range(2)] == [1, 5]
    more = encoded(write_text(tmp_path / "b.txt", 2), CAUSAL(), tokenizer, 4)
    assert tokens.followed_by(more).source_of(2) == more.source_of(0)
    # The last of six tokens would be a row of its own.
    longer = encoded(path, CAUSAL(), tokenizer, 6)
    assert [row["position_ids"] for row in longer] == [[0, 1, 2, 3, 0], [0, 1]]
    unlabelled = [[x == UNLABELLED for x in row["labels"]] for row in longer]
    assert unlabelled == [[True, False, False, False, True], [True, False]]
    assert longer.evaluation_columns["bytes"][:] == [len("  film\nis"), 0]
    # Tokens of bytes share the bytes of a character, within which a row may begin.
    text = "日é🙂 a"
    _, spans = _with_offsets(text, byte_level(False, eos_token="<end>"))
    assert _token_bytes(text, spans) == [1] * len(text.encode()) + [0]
    assert _token_bytes("a日b", [(0, 2), (1, 3)]) == [1 + 1, 2 + 1]
    assert _token_bytes(" a  b", [(1, 2), (4, 5)]) == [2, 3]


def test_documents_in_a_row_are_scored_and_learned_as_if_alone(tokenizer, tmp_path):
    model = t.GPT2LMHeadModel.from_pretrained(make_decoder(tmp_path / "gpt2")).eval()
    task, found = CAUSAL.of(model.config), []
    tokenizer.__class__ = type("Left", (type(tokenizer),), {"padding_side": "left"})  # as LLaMA's
    path = write_text(tmp_path / "a.txt", 4)  # so few that none is cut
    apart, in_one = replace(task, predicting=True), replace(task, separate_documents=False)
    for one, rows in ((task, 1), (apart, 4), (in_one, 1)):
        tokens = encoded(path, one, tokenizer, 30)
        assert len(tokens) == rows
        with torch.no_grad():
            answers = one.answer(model, one.collator(tokenizer)([*tokens]), tokenizer)
        found.append(np.sum(answers, 0))
    together, alone, joined = found
    assert together == pytest.approx(alone, rel=1e-5)
    assert joined != pytest.approx(alone, rel=1e-2)
    with pytest.raises(InputError, match="--onnx: --task causal-lm separates documents by pos"):
        task.answer(torch.nn.Identity(), {"position_ids": None}, tokenizer)
    # Bloom takes no position_ids; Jamba's state carries over to the next document.
    kinds = t.GPT2Config, t.BloomConfig, t.JambaConfig, t.BertConfig
    assert [CAUSAL.of(kind()).separate_documents for kind in kinds] == [True, False, False, False]


def test_a_row_is_hidden_by_itself_and_anew_in_each_epoch(tmp_path, tokenizer):
    rows = encoded(write_text(tmp_path / "a.txt", 40), MASKED(), tokenizer, 12)
    assert max(rows.lengths) == 12
    hide, known = MASKED().collator(tokenizer), [*rows]
    batch = hide(known)
    for i, row in enumerate(known):
        ids, alone = torch.tensor(row["input_ids"]), hide([row])
        assert ids[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
        assert all(torch.equal(alone[k][0], batch[k][i][: len(ids)]) for k in alone)
        hidden = alone["labels"][0] != UNLABELLED
        assert hidden.any() and torch.equal(alone["labels"][0][hidden], ids[hidden])
        assert torch.equal(alone["input_ids"][0][~hidden], ids[~hidden])
        special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        assert not hidden[torch.tensor(special).bool()].any()
    labels = [hide.for_epoch((0, epoch))(known)["labels"] for epoch in (0, 1, 1)]
    assert not torch.equal(labels[0], labels[1]) and torch.equal(labels[1], labels[2])
    share = sum((x != UNLABELLED).sum().item() for x in labels[:2]) / (2 * sum(rows.lengths - 2))
    assert 0.1 < share < 0.3
    tokenizer.mask_token = None
    with pytest.raises(InputError, match=r"a tokenizer with a mask token, and .* has none"):
        MASKED().collator(tokenizer)


def test_windows_hold_the_whole_text_and_the_answer(tmp_path, tokenizer):
    examples = encoded(write_squad(tmp_path / "a.json", 8), SPANS(), tokenizer, 12)
    truth = list(drawn("question-answering", 8))
    seen, answered = [set() for _ in truth], set()
    for row, beside in zip(examples.tokens, examples.evaluation_columns, strict=True):
        number = beside["number"] - 1
        text, (answer,) = truth[number]["context"], truth[number]["answers"]
        spans = list(zip(beside["starts"], beside["ends"], strict=True))
        seen[number].update(span for span in spans if span[0] >= 0)
        start, end = row["start_positions"], row["end_positions"]
        assert (start == 0) == (end == 0) and len(row["input_ids"]) <= 12
        if start:
            answered.add(number)
            assert text[spans[start][0] : spans[end][1]] == answer["text"].strip()
            assert spans[start][0] - answer["answer_start"] == answer["text"].count(" ")
    assert len(examples) > 8 and len(answered) == 8
    assert [*map(len, seen)] == [len(row["context"].split()) for row in truth]


def test_answers_of_windows_and_none(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    text = "good bad the poor nice film is so dull"
    rows = [
        {"id": "x", "question": "a film", "answers": [{"text": "poor nice", "answer_start": 13}]},
        {"id": "y", "question": "film", "answers": [], "is_impossible": True},
    ]
    data = {"data": [{"paragraphs": [{"context": text, "qas": rows}]}]}
    path.write_text(json.dumps(data, indent=1))
    again = [{**row, "context": text} for row in rows]
    assert [*rows_of(tmp_path / "b.json", SPANS, json.dumps(again)).column("id")] == ["x", "y"]
    corpus = load(source(task="question-answering", train=path, evals=path))
    task = corpus.task
    assert task.empty and [*task.describe(corpus)] == ["1 of 2 training questions have no answer"]
    examples = encoded(path, task, tokenizer, 10)
    assert len(examples) > 2

    def answers(none):
        """Logits that are 1 where "poor" begins and "nice" ends; ``none(number)`` for no answer."""
        for beside in examples.evaluation_columns:
            logits = np.float32([np.equal(beside["starts"], 13), np.equal(beside["ends"], 22)])
            logits[:, 0] = none(beside["number"]) + 2 * beside["begins"]  # the least counts
            yield logits

    sure, unsure = [*answers(lambda i: 0)], [*answers(lambda i: 1.5)]
    told = {"text": "poor nice", "score": 2.0, "no_answer": 0.0}
    assert task.predictions(sure, examples) == [told] * 2
    scores = {"f1": 50.0, "exact_match": 50.0}
    assert task.scores(task.default_metrics, sure, examples) == scores
    assert [row["text"] for row in task.predictions(unsure, examples)] == ["", ""]
    # If all training rows have answers, each question gets an answer.
    assert SPANS(False).short_answers(unsure, examples) == ["poor nice"] * 2
    # Less sure of the second question.
    best = {"best_f1": 100.0, "best_exact_match": 100.0}
    assert task.scores(task.metrics, [*answers(lambda i: i / 4)], examples) == scores | best
    unsure[0][0, 1] = math.nan
    assert math.isnan(score(task, ("f1",), unsure, examples)["f1"])


def test_labels_of_words_and_scores_of_those_cut_off(tmp_path, tokenizer):
    path, two = tmp_path / "a.conll", TAGS(("B-GOOD", "O"))
    path.write_text("good-film B-GOOD\nis O\n")
    found = encoded(path, two, tokenizer)
    # [CLS] good - film is [SEP]
    assert found[0]["labels"] == [-100, 0, -100, -100, 1, -100]
    assert found.evaluation_columns[0]["words"] == [-1, 0, -1, -1, 1, -1]
    path.write_text("good B-GOOD\nfilm B-FILM\nis O\n")
    task = TAGS(("B-FILM", "B-GOOD", "O"))
    found = encoded(path, task, tokenizer, 3)
    assert task.predictions([[0, 1, 0]], found) == [{"labels": ["B-GOOD", "", ""]}]
    scores = task.scores(task.metrics, [[0, 1, 0]], found)
    assert scores == {"f1": 2 / 3, "precision": 1, "recall": 0.5, "accuracy": 2 / 3}
    assert np.isnan(score(task, ("f1",), [[0, np.nan, 0]], found)["f1"])
    # A tokenizer that wants blanks before its words.
    path.write_text("good B-GOOD\nfilm O\n")
    with pytest.raises(InputError, match="load it with add_prefix_space=True"):
        encoded(path, two, byte_level(False))
    labels = encoded(path, two, byte_level(True))[0]["labels"]
    assert labels == [0, *[-100] * 4, 1, *[-100] * 4]


def test_rows_without_a_label_have_none_beside_distributions_and_lists(tokenizer):
    rows, task = {"text": ["good", "bad"], "label": [1, UNLABELLED]}, named("classification")
    found = task(("no", "yes"), soft=True).encode(rows, tokenizer, 8)[PROBABILITIES]
    np.testing.assert_equal(found, [[0.0, 1.0], [math.nan] * 2])
    found = named("multi-label")(("a", "b")).encode({"text": ["good"]}, tokenizer, 8)["labels"]
    assert found == [[UNLABELLED] * 2]


def test_losses_of_lists_by_hand():
    """Of lists with scores, without, and again with scores; they have 1, 2 and 0 relevant texts."""
    labels, lists = torch.zeros(8, 3).double(), [slice(0, 3), slice(3, 6), slice(6, 8)]
    labels[lists[1], 0], labels[lists[2], 0], labels[[0, 3, 4], 1] = 1, 2, 1
    given = labels[:, 2] = torch.tensor([2.0, -1.0, 0.5, *[math.nan] * 3, 0.0, -3.0])
    one = {"num_labels": 1, "problem_type": "regression", "initializer_range": 0.5}
    student, teacher = (classifier("bert", 1, **one).double() for _ in range(2))
    batch = {"input_ids": torch.randint(1, 40, (8, 6)), "labels": labels}
    s, t = (x(input_ids=batch["input_ids"]).logits[:, 0].detach() for x in (student, teacher))
    T, given = 2.0, given.double()

    def kl(x, part):
        p = (x[part] / T).softmax(-1)
        return T**2 * (p * (p.log() - (s[part] / T).log_softmax(-1))).sum()

    soft = sum(kl(t, part) for part in lists) / 3
    relevant = -s[lists[1]].log_softmax(-1)[:2].mean()
    task = (kl(given, lists[0]) + relevant + kl(given, lists[2])) / 3
    found = Distiller(teacher, student, SoftTargets(temperature=T)).eval()(**batch).terms
    torch.testing.assert_close([found["soft"], found["task"]], [soft, task])

    def margin(x, positives, negatives):
        errors = [(s[i] - s[j] - x[i] + x[j]) ** 2 for i in positives for j in negatives]
        return sum(errors) / len(errors)

    pairs = [([0], [1, 2]), ([3, 4], [5])]
    for alpha, name, x, some in ((1.0, "margin", t, pairs), (0.0, "task", given, pairs[:1])):
        distiller = Distiller(teacher, student, MarginMSE(alpha=alpha)).eval()
        out = distiller(**batch)
        torch.testing.assert_close(out.terms[name], sum(margin(x, *p) for p in some) / len(some))
        out.loss.backward()
    labels[:, 2] = math.nan
    for wrong, words in ((labels, "no list of the batch has scores"),
                         (labels[:, 0], "MarginMSE compares scores within lists")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            distiller(**{**batch, "labels": wrong})
    # Equal scores count against a document.
    assert _ranked([1.0] * 3, [1.0, 0.0, 0.0]) == (pytest.approx(0.5), pytest.approx(1 / 3))
