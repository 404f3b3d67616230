"""Scores of texts."""

import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from fastkd.train.evaluation import Words, rouge_l


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Der große Übersetzer", ["der", "große", "übersetzer"]),
        ("राम घर गया।", ["राम", "घर", "गया"]),
        ("мир, труд", ["мир", "труд"]),
        ("你好，GPT4世界。", ["你", "好", "gpt4", "世", "界"]),
        ("ペン ﾃﾞ", ["ペ", "ン", "デ"]),
        ("สวัสดี", ["ส", "วั", "ส", "ดี"]),
        ("안녕하세요 세계", ["안녕하세요", "세계"]),
        ("é e\u0301", ["é", "é"]),
        ("?! 👍", ["?", "!", "👍"]),
    ],
)
def test_words_of_every_script(text, words):
    assert Words().tokenize(text) == words
    assert rouge_l([text], [text]) == 1
    assert rouge_l([words[0]], [text]) == pytest.approx(2 / (len(words) + 1))


def test_rouge_of_ascii_text_is_that_of_rouge_score():
    texts = ["It's the 2nd snake_case film.", "the film, it is 2ND", "...", "fine"]
    own, scorer = DefaultTokenizer(use_stemmer=False), RougeScorer(["rougeL"])
    assert all(Words().tokenize(text) == own.tokenize(text) for text in texts if text != "...")
    expected = [scorer.score(a, b)["rougeL"].fmeasure for a in texts[:2] for b in texts[:2]]
    found = [rouge_l([b], [a]) for a in texts[:2] for b in texts[:2]]
    assert found == expected
