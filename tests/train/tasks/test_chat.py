"""Conversations: tokens of answers, generated text, scores, and every command."""

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from fastkd.train.errors import InputError
from fastkd.train.fitting import is_on_policy
from fastkd.train.generation import Draw
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.chat import TASK, prompts_of
from tests.support.runs import losses_of, report_of
from tests.support.tiny import run, usual
from tests.train.tasks.through import encoded, make_chat_teacher, says, write_chats


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def tokenizer(teacher):
    return AutoTokenizer.from_pretrained(teacher)


@pytest.fixture
def model(teacher):
    return GPT2LMHeadModel.from_pretrained(teacher).eval()


@pytest.fixture
def tokens(tokenizer, tmp_path):
    """Rows and tokens of conversations, given or drawn."""

    def tokens(rows, length=16, task=None):
        path = write_chats(tmp_path / "tokens.jsonl", rows)
        return encoded(path, task or TASK(), tokenizer, length)

    return tokens


def test_too_long_a_conversation_keeps_its_middle(tokenizer, tokens):
    for length, kept in (
        (12, "[CLS] a the film is [MASK] good fine nice bad poor [SEP]"),
        (11, "[CLS] a the film is [MASK] good fine nice bad poor"),
        (6, "film is [MASK] good fine nice"),
    ):
        (row,) = tokens([says("a the film is", "good fine nice bad poor")], length)
        assert " ".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) == kept
        assert [label != -100 for label in row["labels"]].index(True) == kept.split().index("good")


@pytest.mark.parametrize(("template", "words"), [
    (None, "--task chat needs a tokenizer with a chat template"),
    ("{{ messages[-1].content | upper }}", "row 1: the tokens of message 2 cannot be found"),
    ("{{ raise_exception('only systems') }}",
     "row 1: the .* template refuses it .only systems"),
    ("{% if x %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0].content }}",
     "row 1: the .* template marks no token"),
])  # fmt: skip
def test_a_template_that_does_not_tell(tokenizer, tokens, template, words):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=words):
        tokens([says("a film", "good")])


def apart(row, name):
    starts = [i for i, at in enumerate(row["position_ids"]) if at == 0]
    ends = [*starts[1:], len(row["position_ids"])]
    return [row[name][a:b] for a, b in zip(starts, ends, strict=True)]


def test_what_a_student_draws_is_masked_exactly(tokenizer, model, tokens):
    model.train()
    task, rows = TASK(), tokens(6)
    collate = task.collator(tokenizer)
    (batch,) = rows.batches(collate, 6)
    drawn = task.generated(model, batch, tokenizer, 0)
    assert model.training
    end, lengths = tokenizer.sep_token_id, set()
    for row, prompt in zip(drawn, prompts_of(batch), strict=True):
        ids, labels = row["input_ids"], row["labels"]
        written = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + written
        assert end not in written[:-1] and (written[-1] == end or len(written) == 16)
        lengths.add(len(written))
    assert len(lengths) > 1
    # For every batch: one row only, another order, or packed.
    other = [rows[i] for i in reversed(range(6))]
    assert task.generated(model, collate(other), tokenizer, 0) == drawn[::-1]
    assert task.generated(model, collate(other[:1]), tokenizer, 0) == drawn[-1:]
    assert task.generated(model, batch, tokenizer, 1) != drawn
    together = task.generated(model, collate([*tokens(6, 32, task.for_packing())]), tokenizer, 0)
    alone = [row["input_ids"] for row in drawn]
    assert len(together) < 6 and sorted(alone) == sorted(
        ids for row in together for ids in apart(row, "input_ids")
    )


def test_packed_rows_hold_the_tokens_of_the_conversations(tokenizer, tokens):
    """That they teach the same: tests/distill/test_distiller.py."""
    single, packed = (tokens(9, 32, x) for x in (TASK(), TASK().for_packing()))
    assert len(packed) < 6 and max(packed.lengths) <= 32 < 2 * min(sorted(packed.lengths)[1:])
    for name in ("input_ids", "labels"):
        together = sorted(part for row in packed for part in apart(row, name))
        assert together == sorted(row[name] for row in single)
    batch = TASK().collator(tokenizer)([*packed])
    for i, row in enumerate(packed):
        assert batch["position_ids"][i][: len(row["labels"])].tolist() == row["position_ids"]
    for task, words in (
        (TASK(separate_documents=False), "--pack: the model does not separate the conversations"),
        (named("causal-lm")(), "--pack: rows of --task causal-lm are not packed"),
    ):
        with pytest.raises(InputError, match=words):
            task.for_packing()


def test_words_are_drawn_as_often_as_they_are_likely_and_steps_are_spread():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log().expand(4000, 5)
    found = Draw(3, [[i] for i in range(4000)])(torch.zeros(4000, 1), scores).argmax(-1)
    shares = found.bincount(minlength=5) / 4000
    torch.testing.assert_close(shares, scores[0].exp(), atol=0.03, rtol=0)
    for share, count in ((0.1, 100), (0.25, 250), (1 / 3, 333), (1.0, 1000)):
        steps = [is_on_policy(step, share) for step in range(1000)]
        assert sum(steps) == count
        assert sum(steps[:100]) == pytest.approx(100 * share, abs=1)


@pytest.fixture
def on_policy(teacher, tmp_path):
    """Options of a student that writes in half of the steps."""
    files = [write_chats(tmp_path / f"{i}.jsonl", 12, i) for i in range(2)]
    return {
        "task": "chat", "train": files[0], "eval": files[1], "teacher": teacher, "max_length": 16,
        "method": "soft_targets", "epochs": 1, "batch_size": 5, "device": "cpu", "on_policy": 0.5,
        "learning_rate": 1e-2,
    }  # fmt: skip


def test_losses_of_an_epoch_do_not_depend_on_the_log(on_policy, tmp_path):
    """Not every step has labels, and the last one has fewer rows and micro-batches.

    With answers of its own in every step a student learns from the teacher alone. Sampled text
    depends on --seed alone, also in `fastkd evaluate`, by the student's manifest.
    """
    found = []
    for logging, accumulate, share in ((1, None, 0.5), (2, 4, 0.5), (1, None, 1)):
        args, out = tmp_path / f"{logging}.yaml", tmp_path / str(len(found))
        args.write_text(f"logging_steps: {logging}\n")
        options = {"on_policy": share, "trainer_args": args, "accumulate": accumulate, "out": out}
        run("distill", **{**on_policy, **options}, max_new_tokens=2, sample=0.5)
        found.append(losses_of(out))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert set(found[2]) == {"loss", "soft"}
    student, scores = tmp_path / "0/student", tmp_path / "scores.json"
    run("evaluate", model=student, data=on_policy["eval"], batch_size=2, out=scores, device="cpu")
    assert read_json(scores)["rouge_l"] == report_of(tmp_path / "0")["student"]["rouge_l"]


def test_where_a_student_cannot_learn_from_itself(on_policy, tiny, tmp_path):
    for options, words in (
        ({"teacher": None, "teacher_cache": tmp_path},
         "--on-policy and --teacher-cache exclude each other"),
        ({"method": "knn"}, "--method knn: compares rows of one class, but rows of --task chat"),
        ({"method": "gold"}, "--method gold: compares language models of two tokenizers"),
        ({"method": "labels"}, "--on-policy: Labels trains on labels alone"),
        ({"on_policy": 2}, "--on-policy must be at most 1, got 2"),
        ({"on_policy": None, "task": "causal-lm", "max_new_tokens": 2},
         "--max-new-tokens: models of --task causal-lm don't"),
    ):  # fmt: skip
        options = usual(tiny, tmp_path, **{**on_policy, **options})
        assert words in run("distill", **options, expect=2)
