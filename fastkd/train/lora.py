"""LoRA adapters on student or teacher (Hu et al. 2021), by PEFT: --lora r=16,alpha=32."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fastkd._core.extras import require
from fastkd.train.errors import InputError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Directory of the adapters, beside the weights into which they are merged.
ADAPTER = "adapter"
# PEFT's task types of transformers' heads; PEFT also trains the head of a classifier. Its wrapper
# for question answering drops token types, so that such a model has no task type.
HEADS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
# Models whose modules outside the body are trained in full; PEFT finds only some of them by name.
# The pooler of an encoder is trained too, since many encoders are published without one.
TRAINED = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
)


def read(given: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Options of ``peft.LoraConfig`` from the values of --lora or --teacher-lora."""
    words: dict[str, Any] = {"r": 8, "alpha": 16, "targets": "all-linear", "dropout": 0.0}
    for name, value in given.items():
        if name not in words:
            raise InputError(f"{option} {name}: {nearest(name, words)}")
        words[name] = value
    number = type(words["r"]) is int and words["r"] > 0
    if not number:
        raise InputError(f"{option} r={words['r']}: must be a whole number above 0")
    for name, bound in (("alpha", float("inf")), ("dropout", 1.0)):
        value = words[name]
        if type(value) not in (int, float) or not 0 <= value < bound:
            most = "" if bound > 1 else " and below 1"
            raise InputError(f"{option} {name}={value}: must be a number, at least 0{most}")
    targets = str(words["targets"])
    return {
        "r": words["r"],
        "lora_alpha": words["alpha"],
        "lora_dropout": words["dropout"],
        "target_modules": targets if targets == "all-linear" else targets.split("+"),
    }


def adapted(
    model: "PreTrainedModel",
    given: Mapping[str, Any],
    head: str,
    name: str | None,
    option: str = "--lora",
) -> "PreTrainedModel":
    """``model`` with adapters, which alone are trained (and its head, where it is new).

    ``head`` is transformers' class of the model; ``name`` is its path or hub name, None for a
    student of teacher layers. Errors name ``option``.
    """
    peft: Any = require("peft", "lora")
    body = model.base_model_prefix
    parts = dict(model.named_modules()) if head in TRAINED else {}
    heads = [name for name in parts if "." not in name and name not in ("", body)]
    heads += [name for name in parts if name == f"{body}.pooler"]
    whole = [name for name in heads if [*parts[name].parameters()]]
    config = peft.LoraConfig(
        task_type=HEADS.get(head), modules_to_save=whole or None, **read(given, option)
    )
    try:
        found = peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise InputError(f"{option}: {str(error).splitlines()[0]}") from error
    # A student of teacher layers would carry the name of the teacher, another model.
    config.base_model_name_or_path = name or ""
    return cast("PreTrainedModel", found)


def save(student: nn.Module, directory: Path) -> None:
    """Save a model with adapters for ``from_pretrained``: merged, and on their own."""
    model: Any = student
    model.save_pretrained(directory / ADAPTER)
    # A copy is merged: subtracting the adapters again would change the weights' bits.
    copy.deepcopy(model).merge_and_unload().save_pretrained(directory)
