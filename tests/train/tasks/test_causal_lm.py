"""Language models: documents, packing, scores, and every command."""

from dataclasses import replace

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.tasks.causal_lm import TASK, _token_bytes, _with_offsets
from tests.support.tiny import make_teacher, run
from tests.train.tasks.through import (
    encoded,
    make_decoder,
    rows_of,
    write_text,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_decoder(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="module")
def tokenizer(path):
    return t.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def model(path):
    return t.GPT2LMHeadModel.from_pretrained(path).eval()


def test_documents_are_packed_and_their_bytes_counted(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("good  film\nis\n\n\nbad film\n")
    found = rows_of(path, TASK).columns("number", "text")
    assert list(found) == [(1, "good  film\nis"), (5, "bad film")]
    tokens = encoded(path, TASK(), tokenizer, 4)
    end = tokenizer.sep_token
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in tokens.tokens["input_ids"]]
    assert words == [["good", "film", "is", end], ["bad", "film", end]]
    assert tokens.evaluation_columns["bytes"][:] == [len("  film\nis"), len(" film")]
    assert [tokens.source_of(i)[1] for i in range(2)] == [1, 5]
    # The last of six tokens would be a row of its own.
    longer = encoded(path, TASK(), tokenizer, 6)
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


def test_documents_in_a_row_are_scored_and_learned_as_if_alone(tokenizer, model, tmp_path):
    task = TASK.of(model.config)
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


@pytest.mark.parametrize("kind", [t.GPT2Config, t.BloomConfig, t.JambaConfig, t.BertConfig])
def test_models_that_know_documents_by_positions(kind):
    """Bloom takes no position_ids; Jamba's state carries over to the next document."""
    assert TASK.of(kind()).separate_documents == (kind is t.GPT2Config)


def test_an_encoder_would_see_what_it_is_to_predict(tmp_path):
    rows = write_text(tmp_path / "a.txt", 12)
    said = run("distill", train=rows, eval=rows, task="causal-lm", max_length=16, device="cpu",
               teacher=make_teacher(tmp_path / "bert", head=False), finetune_teacher=1,
               out=tmp_path / "run", expect=2)  # fmt: skip
    assert "a bert model attends to both sides" in said and "--task masked-lm" in said
