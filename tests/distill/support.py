"""What works with what, tried out on tiny models.

`python -m tests.distill.support` writes the table of docs/support.md.
"""

import copy
import functools
import re
import warnings
from pathlib import Path

import torch
import transformers as t

from fastkd.distill import METHODS, AttentionMSE, Distiller, method_by_name, student_from_teacher
from tests.distill.models import FAMILIES, PADS_LEFT, batch, config_of

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

HEADS = {
    "none": t.AutoModel,
    "sequence": t.AutoModelForSequenceClassification,
    "tokens": t.AutoModelForTokenClassification,
    "answers": t.AutoModelForQuestionAnswering,
    "choices": t.AutoModelForMultipleChoice,
    "masked words": t.AutoModelForMaskedLM,
    "next word": t.AutoModelForCausalLM,
    "written words": t.AutoModelForSeq2SeqLM,
    "transcripts": t.AutoModelForSpeechSeq2Seq,
    "image": t.AutoModelForImageClassification,
    "sound": t.AutoModelForAudioClassification,
}
WRITTEN = ("written words", "transcripts")
IMAGES = {"vit", "deit", "dinov2"}
# Heads whose class has another name.
ENCODERS = {"t5": t.T5EncoderModel}

MANY_LABELS = ("tokens", "answers", "choices", "masked words", "next word", *WRITTEN)
NOT_MEANT = "there is no head", "KNN takes one label a sample"
ALL = [*METHODS, "attention"]
# No terms on logits.
WITHOUT_HEAD = {
    "fcd": {"task_weight": 0.0},
    "knn": {"alpha2": 0.0, "alpha3": 0.0},
    "lrc_bert": {"beta": 0.0, "gamma": 0.0},
    "mc3kd": {"alpha": None},
    "lrkd": {"alpha": None},
    "attention": {"soft_weight": 0.0},
}


def heads(family):
    """The heads that transformers has for it; a decoder that predicts words is enough."""
    config = config_of(family)
    for head, auto in HEADS.items():
        if type(config) not in auto._model_mapping:
            continue
        if head == "next word" and type(config) in t.AutoModelForMaskedLM._model_mapping:
            continue
        yield head


def model_of(family, head):
    return copy.deepcopy(_model(family, head))


@functools.cache
def _model(family, head):
    config = config_of(family, num_labels=2 if head == "answers" else 3)
    config.architectures = ["DeiTForImageClassification"] if family == "deit" else None
    torch.manual_seed(0)
    if head == "none" and family in ENCODERS:
        return ENCODERS[family](config)
    return HEADS[head].from_config(config)


def data_of(family, head):
    torch.manual_seed(1)
    if family in IMAGES:
        images = {"pixel_values": torch.randn(4, 3, 16, 16)}
        return {**images, "labels": torch.tensor([0, 1, 0, 2])}
    if family == "whisper" and head != "next word":
        sounds = {"input_features": torch.randn(4, 8, 40)}
        if head == "none":
            sounds["decoder_input_ids"] = torch.randint(5, 60, (4, 6))
        return {**sounds, "labels": words() if head in WRITTEN else torch.tensor([0, 1, 0, 2])}
    data = batch(rows=4, left=family in PADS_LEFT)
    ids, mask = data["input_ids"], data["attention_mask"]
    if family == "longformer" and head in ("answers", "choices"):
        ids[:, 1:4] = config_of(family).sep_token_id
    if family == "prophetnet" and head == "none":
        data["decoder_input_ids"] = torch.randint(5, 60, (4, 6))
    if config_of(family).is_encoder_decoder:  # whose heads read the end
        ids[torch.arange(4), mask.sum(1) - 1] = config_of(family).eos_token_id
    if head in WRITTEN:
        data["labels"] = words()
    if head in ("tokens", "masked words", "next word"):
        data["labels"] = (ids % 3 if head == "tokens" else ids).masked_fill(mask == 0, -100)
    if head == "answers":
        first = mask.argmax(1)
        data = {**data, "start_positions": first + 1, "end_positions": first + 2}
        del data["labels"]
    if head == "choices":
        data = {"input_ids": ids.view(2, 2, -1), "attention_mask": mask.view(2, 2, -1)}
        data["labels"] = torch.tensor([0, 1])
    return data


def words():
    """Labels of an encoder-decoder, shorter than its inputs; two rows are padded."""
    labels = torch.randint(5, 60, (4, 6))
    labels[::2, 4:] = -100
    return labels


def method_of(name, head):
    """With the paper's values, which have more terms than the defaults."""
    options = dict(WITHOUT_HEAD.get(name, {}) if head == "none" else {})
    if name == "attention":
        return AttentionMSE(**options)
    return method_by_name(name, preset="paper", **options)


def verdict(teacher, student, data, name, head):
    """None if a step works: a finite loss, and a gradient in every block of the student."""
    if head == "none" and name not in WITHOUT_HEAD:
        return NOT_MEANT[0]
    if name == "knn" and head in MANY_LABELS:
        return NOT_MEANT[1]
    try:
        if name == "attention":  # the last
            teacher.set_attn_implementation("eager")
            student.set_attn_implementation("eager")
        distiller = Distiller(teacher, student, method_of(name, head))
        distiller.prepare([data])
        distiller.set_progress(1.0)
        student.zero_grad()
        out = distiller(**data)
        out.loss.backward()
    except Exception as error:
        return reason(error)
    if not out.loss.isfinite():
        return "the loss is not finite"
    blocks = distiller.student_model.blocks
    reached = [any(p.grad is not None and p.grad.any() for p in b.parameters()) for b in blocks]
    return None if all(reached) else "a block gets no gradient"


def reason(error):
    return re.sub(r" \(\w+\)", "", str(error).split("; ")[0].split("\n")[0])


def rows_of(family, methods=lambda head: ALL):
    """(head, {method: None or why not}) of a family's heads that have any ``methods``."""
    for head in filter(methods, heads(family)):
        data = data_of(family, head)
        try:
            teacher = model_of(family, head).eval()
            student = student_from_teacher(teacher, [1, 3])
        except Exception as error:
            yield head, dict.fromkeys(ALL, reason(error))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = methods(head)
            yield head, {name: verdict(teacher, student, data, name, head) for name in found}


def mark(why):
    return "yes" if why is None else "–" if why in NOT_MEANT else "no"


def lines_of(family):
    """The family's lines of the table; heads with equal results share a line."""
    alike = {}
    for head, found in rows_of(family):
        alike.setdefault(tuple(found.values()), []).append(head)
    for found, heads in alike.items():
        wrong = sorted({why for why in found if why not in (None, *NOT_MEANT)})
        marks = " | ".join(map(mark, found))
        yield f"| {family} | {', '.join(heads)} | {marks} | {'; '.join(wrong)} |"


def written():
    """The page's lines before the table, and the cells of the table's lines."""
    before, rule, table = PAGE.read_text().partition(f"\n|{'---|' * (len(ALL) + 3)}\n")
    return before + rule, [line.strip("| ").split(" | ") for line in table.splitlines()]


if __name__ == "__main__":
    lines = [line for family in sorted(FAMILIES) for line in lines_of(family)]
    PAGE.write_text(written()[0] + "\n".join(lines) + "\n")
