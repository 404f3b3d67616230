"""Tokens of rows and scores of answers, of tasks that are unlike others.

Documents of language models, masked tokens, windows around answers, and tags of words.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.data import Encoder, load
from fastkd.train.errors import InputError
from fastkd.train.scoring import score
from fastkd.train.tasks import named
from fastkd.train.tasks.causal_lm import _token_bytes, _with_offsets
from tests.support.tiny import make_teacher, run, source
from tests.train.tasks.through import (
    encoded,
    make_decoder,
    questions,
    rows_of,
    write_squad,
    write_text,
)

NAMES = ("causal-lm", "masked-lm", "question-answering", "token-classification")
CAUSAL, MASKED, SPANS, TAGS = map(named, NAMES)


@pytest.fixture
def tokenizer(tiny):
    return t.AutoTokenizer.from_pretrained(tiny / "teacher")


def test_documents_are_packed_and_their_bytes_counted(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("good  film\nis\n\n\nbad film\n")
    found = rows_of(path, CAUSAL).columns("number", "text")
    assert list(found) == [(1, "good  film\nis"), (5, "bad film")]
    tokens = encoded(path, CAUSAL(), tokenizer, 4)
    end = tokenizer.sep_token
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in tokens.tokens["input_ids"]]
    assert words == [["good", "film", "is", end], ["bad", "film", end]]
    assert tokens.evaluation_columns["bytes"][:] == [len("  film\nis"), len(" film")]
    assert [tokens.source_of(i)[1] for i in range(2)] == [1, 5]
    # The last of six tokens would be a row of its own.
    longer = encoded(path, CAUSAL(), tokenizer, 6)
    assert [len(ids) for ids in longer.tokens["input_ids"]] == [5, 2]
    assert [row["position_ids"] for row in longer] == [[0, 1, 2, 3, 0], [0, 1]]
    assert [row["labels"][0] for row in longer] == [UNLABELLED, UNLABELLED]
    assert longer[0]["labels"][4] == UNLABELLED
    assert longer.evaluation_columns["bytes"][:] == [len("  film\nis"), 0]


def test_tokens_of_bytes_share_the_bytes_of_a_character():
    """A row that begins within a character has a part of its bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    text = "日é🙂 a"
    _, spans = _with_offsets(text, tokenizer)
    assert _token_bytes(text, spans) == [1] * len(text.encode()) + [0]
    assert _token_bytes("a日b", [(0, 2), (1, 3)]) == [1 + 1, 2 + 1]
    assert _token_bytes(" a  b", [(1, 2), (4, 5)]) == [2, 3]


def test_documents_in_a_row_are_scored_and_learned_as_if_alone(tokenizer, tmp_path):
    model = t.GPT2LMHeadModel.from_pretrained(make_decoder(tmp_path / "gpt2")).eval()
    task = CAUSAL.of(model.config)
    assert task.separate_documents
    path = write_text(tmp_path / "a.txt", 4)  # so few that none is cut

    def loss(task):
        tokens = encoded(path, task, tokenizer, 30)
        with torch.no_grad():
            answers = [
                one
                for batch in tokens.batches(task.collator(tokenizer), 4)
                for one in task.answer(model, batch, tokenizer)
            ]
        return len(tokens), [sum(x) for x in zip(*answers, strict=True)]

    (packed, together), (apart, alone) = loss(task), loss(replace(task, predicting=True))
    assert packed == 1 and apart == 4
    assert together == pytest.approx(alone, rel=1e-5)
    assert loss(replace(task, separate_documents=False))[1] != pytest.approx(alone, rel=1e-2)
    with pytest.raises(InputError, match="--onnx: --task causal-lm separates documents by pos"):
        task.answer(torch.nn.Identity(), {"position_ids": None}, tokenizer)


@pytest.mark.parametrize("kind", [t.GPT2Config, t.BloomConfig, t.JambaConfig, t.BertConfig])
def test_models_that_know_documents_by_positions(kind):
    """Bloom takes no position_ids; Jamba's state carries over to the next document."""
    assert CAUSAL.of(kind()).separate_documents == (kind is t.GPT2Config)


def test_an_encoder_would_see_what_it_is_to_predict(tmp_path):
    rows = write_text(tmp_path / "a.txt", 12)
    said = run("distill", train=rows, eval=rows, task="causal-lm", max_length=16, device="cpu",
               teacher=make_teacher(tmp_path / "bert", head=False), finetune_teacher=1,
               out=tmp_path / "run", expect=2)  # fmt: skip
    assert "a bert model attends to both sides" in said and "--task masked-lm" in said


def test_a_row_is_hidden_by_itself_and_anew_in_each_epoch(tmp_path, tokenizer):
    rows = encoded(write_text(tmp_path / "a.txt", 40), MASKED(), tokenizer, 12)
    assert {ids[0] for ids in rows.tokens["input_ids"]} == {tokenizer.cls_token_id}
    assert {ids[-1] for ids in rows.tokens["input_ids"]} == {tokenizer.sep_token_id}
    assert max(rows.lengths) == 12
    hide, number = MASKED().collator(tokenizer), range(len(rows))
    batch = hide([rows[i] for i in number])
    for i in number:
        alone = hide([rows[i]])
        assert all(torch.equal(alone[k][0], batch[k][i][: rows.lengths[i]]) for k in alone)
        hidden = alone["labels"][0] != UNLABELLED
        ids = torch.tensor(rows[i]["input_ids"])
        assert hidden.any() and torch.equal(alone["labels"][0][hidden], ids[hidden])
        assert torch.equal(alone["input_ids"][0][~hidden], ids[~hidden])
        special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        assert not hidden[torch.tensor(special).bool()].any()
    labels = [
        hide.for_epoch((0, epoch))([rows[i] for i in number])["labels"] for epoch in (0, 1, 1)
    ]
    assert not torch.equal(labels[0], labels[1]) and torch.equal(labels[1], labels[2])
    share = sum((x != UNLABELLED).sum().item() for x in labels[:2]) / (2 * sum(rows.lengths - 2))
    assert 0.1 < share < 0.3
    without = t.AutoTokenizer.from_pretrained(make_decoder(tmp_path / "gpt2"), mask_token=None)
    with pytest.raises(InputError, match=r"a tokenizer with a mask token, and .* has none"):
        MASKED().collator(without)


def test_windows_hold_the_whole_text_and_the_answer(tmp_path, tokenizer):
    examples = encoded(write_squad(tmp_path / "a.json", 8), SPANS(), tokenizer, 12)
    truth = list(questions(8))
    seen = {number: set() for number in range(1, 9)}
    answered = set()
    for row, beside in zip(examples.tokens, examples.evaluation_columns, strict=True):
        number = beside["number"]
        _, _, text, (answer,) = truth[number - 1]
        spans = list(zip(beside["starts"], beside["ends"], strict=True))
        seen[number].update(span for span in spans if span[0] >= 0)
        start, end = row["start_positions"], row["end_positions"]
        assert (start == 0) == (end == 0) and len(row["input_ids"]) <= 12
        if start:
            answered.add(number)
            assert text[spans[start][0] : spans[end][1]] == answer["text"]
            assert spans[start][0] == answer["answer_start"]
    assert len(examples) > 8 and answered == set(seen)
    for number, found in seen.items():
        assert len(found) == len(truth[number - 1][2].split())


def answers_for(examples, start, end, none=0.0):
    """Logits that are 1 where a context's character ``start`` begins a token, and ``end`` ends."""
    for beside in examples.evaluation_columns:
        logits = np.zeros((2, beside["length"]), dtype=np.float32)
        logits[0][[x == start for x in beside["starts"]]] = 1
        logits[1][[x == end for x in beside["ends"]]] = 1
        logits[:, 0] = none
        yield logits


def test_answers_of_windows_and_none(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    text = "good bad the poor nice film is so dull"
    rows = [
        {"id": "x", "question": "a film", "answers": [{"text": "poor nice", "answer_start": 13}]},
        {"id": "y", "question": "film", "answers": [], "is_impossible": True},
    ]
    data = {"data": [{"paragraphs": [{"context": text, "qas": rows}]}]}
    path.write_text(json.dumps(data, indent=1))
    corpus = load(source(task="question-answering", train=path, evals=path))
    task = corpus.task
    said = ["1 of 2 training questions have no answer"]
    assert task.empty and list(task.describe(corpus)) == said
    examples = encoded(path, task, tokenizer, 10)
    assert len(examples) > 2
    answers = list(answers_for(examples, 13, 22))
    told = task.predictions(answers, examples)
    assert told == [{"text": "poor nice", "score": 2.0, "no_answer": 0.0}] * 2
    assert task.scores(task.default_metrics, answers, examples) == {"f1": 50.0, "exact_match": 50.0}
    none = list(answers_for(examples, 13, 22, 1.5))
    assert [row["text"] for row in task.predictions(none, examples)] == ["", ""]
    # If all training rows have answers, each question gets an answer.
    assert SPANS(False).short_answers(none, examples) == ["poor nice"] * 2
    for logits, beside in zip(answers, examples.evaluation_columns, strict=True):
        logits[:, 0] = beside["number"] / 4  # less sure of the second question
    best = {"best_f1": 100.0, "best_exact_match": 100.0}
    assert task.scores(task.metrics, answers, examples) == {"f1": 50, "exact_match": 50, **best}
    none[0][0, 1] = math.nan
    assert math.isnan(score(task, ("f1",), none, examples)["f1"])


def test_rows_line_by_line_and_in_one(tmp_path, tokenizer):
    """Each question has windows of its own, though all stand on one line."""
    found = {"text": ["b"], "answer_start": [2]}
    row = {"id": "q", "question": "a", "context": "a b", "answers": found}
    rows = rows_of(tmp_path / "a.jsonl", SPANS, json.dumps(row))
    assert list(rows.columns("id", "label")) == [("q", found)]
    texts = ("good bad the poor nice film is so dull", "the film")
    found = {"text": [], "answer_start": []}
    rows = [{"id": i, "question": "a", "context": x, "answers": found} for i, x in enumerate(texts)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    examples = encoded(path, SPANS(), tokenizer, 10)
    assert SPANS(False).short_answers(list(answers_for(examples, 4, 8)), examples) == [
        "bad",
        "film",
    ]


def test_labels_of_words_and_scores_of_those_cut_off(tmp_path, tokenizer):
    rows = rows_of(tmp_path / "a.conll", TAGS, "good-film B-GOOD\nis O\n")
    found = Encoder(tokenizer, 16, TAGS(("B-GOOD", "O")))(rows)
    # [CLS] good - film is [SEP]
    assert found[0]["labels"] == [-100, 0, -100, -100, 1, -100]
    assert found.evaluation_columns[0]["words"] == [-1, 0, -1, -1, 1, -1]
    rows = rows_of(tmp_path / "a.conll", TAGS, "good B-GOOD\nfilm B-FILM\nis O\n")
    task = TAGS(("B-FILM", "B-GOOD", "O"))
    found = Encoder(tokenizer, 3, task)(rows)
    assert task.predictions([[0, 1, 0]], found) == [{"labels": ["B-GOOD", "", ""]}]
    scores = task.scores(("precision", "recall", "f1", "accuracy"), [[0, 1, 0]], found)
    assert scores["precision"] == 1 and scores["recall"] == 0.5
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert np.isnan(score(task, ("f1",), [[0, np.nan, 0]], found)["f1"])


def test_words_of_a_tokenizer_that_wants_blanks_before_them(tmp_path):
    rows, encode = rows_of(tmp_path / "a.conll", TAGS, "good B-GOOD\nfilm O\n"), {}
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for blank in (False, True):
        made = Tokenizer(models.BPE(letters, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
        tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=made, add_prefix_space=blank)
        encode[blank] = Encoder(tokenizer, 16, TAGS(("B-GOOD", "O")))
    with pytest.raises(InputError, match="load it with add_prefix_space=True"):
        encode[False](rows)
    assert encode[True](rows)[0]["labels"] == [0, *[-100] * 4, 1, *[-100] * 4]
