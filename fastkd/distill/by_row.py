"""A teacher for each row of a batch, and its rows' outputs put together."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastkd.models.backbone import Model
from fastkd.models.batch import Batch
from fastkd.models.outputs import Outputs


class ByRow(nn.Module):
    """Teachers of which each serves its own rows, as experts of several fields do.

    ``Distiller(ByRow({"math": teacher, "code": other}), student, method)`` reads ``teacher_id``
    from each batch: a list of names, or a tensor (B,) of their numbers in the order of the
    dictionary. Each teacher runs on its rows alone. Losses are means over all rows, as if one
    teacher had served them. A batch, or a process, may have no row of a teacher.

    Methods that compare predictions (`SoftTargets`) take teachers of any sizes. Methods that
    compare layers need teachers of equal sizes, and MC3KD needs ``layers``. With a list of
    ``tokenizers`` a `Distiller` takes the student's and each teacher's. The split reads
    ``teacher_id`` on the host, so a compiled Distiller's graph breaks there.

    Args:
        teachers: for each name a model, a `TeacherCache`, a
            `fastkd.integrations.ServedTeacher`, or `Blocks`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from fastkd.distill import ByRow, Distiller, SoftTargets, student_from_teacher
    >>> sizes = dict(vocab_size=50, n_head=2, n_layer=4)
    >>> math, code = (GPT2LMHeadModel(GPT2Config(n_embd=n, **sizes)) for n in (16, 32))
    >>> teachers = ByRow({"math": math, "code": code})
    >>> distiller = Distiller(teachers, student_from_teacher(math, [2, 4]), SoftTargets())
    >>> ids = torch.arange(36).view(3, 12)
    >>> out = distiller(input_ids=ids, labels=ids, teacher_id=["math", "code", "math"])
    >>> sorted(out.terms)
    ['soft', 'task', 'total']
    """

    def __init__(self, teachers: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(teachers, Mapping) or not teachers:
            raise TypeError("teachers: pass a dictionary of names and teachers, at least one")
        if unnamed := [name for name in teachers if not isinstance(name, str)]:
            raise TypeError(
                f"teachers: {unnamed[0]!r} is no string; name each teacher, since numbers in "
                "teacher_id are places in the dictionary"
            )
        wrong = [name for name, x in teachers.items() if not isinstance(x, nn.Module)]
        if wrong:
            raise TypeError(
                f"teachers: {wrong[0]!r} is a {type(teachers[wrong[0]]).__name__}; pass a model, a "
                "TeacherCache or a ServedTeacher"
            )
        self.names = tuple(teachers)
        self.models = nn.ModuleList(teachers.values())

    @property
    def live(self) -> dict[str, nn.Module]:
        """The teachers that are models of transformers."""
        each = zip(self.names, self.models, strict=True)
        return {name: model for name, model in each if hasattr(model, "get_input_embeddings")}

    def split(self, inputs: Mapping[str, Any]) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """For each teacher's number its rows (b,) of a batch, and the inputs of these rows.

        Teachers whose weights are spread over processes, by FSDP2 or ZeRO-3, have an entry in every
        batch, since all processes must run them; the others only for their rows.
        """
        given = inputs.get("teacher_id")
        if given is None:
            raise ValueError(
                f"teacher_id: missing; pass each row's teacher: {', '.join(self.names)}"
            )
        numbers = self._numbers(given)
        device = next((x.device for x in inputs.values() if isinstance(x, Tensor)), None)
        parts = {}
        for number in range(len(self.names)):
            rows = [row for row, own in enumerate(numbers) if own == number]
            weights = self.models[number].parameters()
            spread = (hasattr(x, "device_mesh") or hasattr(x, "ds_id") for x in weights)
            if rows or (number == 0 and not numbers) or any(spread):
                index = torch.tensor(rows, dtype=torch.int64, device=device)
                parts[number] = index, _rows_of(inputs, index, len(numbers))
        return parts

    def _numbers(self, given: Any) -> list[int]:
        values = given.flatten().tolist() if isinstance(given, Tensor) else list(given)
        numbers = [self.names.index(x) if x in self.names else x for x in values]
        for x in numbers:
            if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < len(self.names):
                raise ValueError(
                    f"teacher_id: {x!r} is none of the teachers; pass {', '.join(self.names)}, or "
                    f"numbers from 0 to {len(self.names) - 1}"
                )
        return numbers


def _rows_of(inputs: Mapping[str, Any], rows: Tensor, count: int) -> dict[str, Any]:
    """Each input of these rows of a batch of ``count``."""
    own = {}
    for name, x in inputs.items():
        if name == "teacher_id":
            continue
        if isinstance(x, Tensor) and x.dim():
            dim = int("position_ids" in name and x.dim() == 3)  # (3, B, N) with images
            if x.shape[dim] != count:
                raise ValueError(
                    f"teacher_id: names {count} rows, but {name} has shape {tuple(x.shape)}; every "
                    "input needs one entry a row"
                )
            x = x.index_select(dim, rows.to(x.device))
        own[name] = x
    return own


@dataclass
class RowPart:
    """One teacher's rows (b,) of a batch, the batch of these rows, and the teacher's outputs."""

    rows: Tensor
    batch: Batch
    model: Model
    outputs: Outputs

    def longest(self, tokens: int) -> int:
        """Length of the longest document, of up to ``tokens``: rows of one may keep padding."""
        mask = self.batch.feature_mask
        if mask is None:
            return tokens
        return max(mask.any(0).nonzero().flatten().tolist(), default=-1) + 1

    def samples(self) -> Tensor:
        """The row of each sample of the features: packed rows and questions have several."""
        features, documents = self.outputs.all_features(), self.batch.documents
        if documents is not None and documents.packed:
            return self.rows[documents.index[:, 0] // documents.document_ids.shape[1]]
        each = len(features[0]) // max(len(self.rows), 1) if features else 1
        return self.rows.repeat_interleave(each)


@dataclass
class RowOutputs(Outputs):
    """Outputs of a `ByRow`: features of all rows, and each teacher's own predictions."""

    parts: tuple[RowPart, ...] = ()

    @property
    def at_head(self) -> bool:
        return all(part.outputs.at_head for part in self.parts)

    def without_logits(self) -> Outputs:
        return dataclasses.replace(self, parts=())

    @classmethod
    def of(cls, parts: Sequence[RowPart]) -> Outputs:
        """The parts' features as one, in the order of the batch; logits too if they fit."""
        outputs = [part.outputs for part in parts]
        kept = [x.all_features() for x in outputs]
        if kept[0]:
            length = max(each[0].shape[-2] for each in kept)
            if any(part.batch.document_ids is not None for part in parts):  # of packed rows
                length = max(part.longest(length) for part in parts)
            outputs = [
                x.padded(length - each[0].shape[-2]) for x, each in zip(outputs, kept, strict=True)
            ]
        order = torch.cat([part.samples() for part in parts]).argsort(stable=True)
        merged = outputs[0].without_logits().joined([x.without_logits() for x in outputs[1:]])
        merged = merged.samples(lambda x: x[order.to(x.device)])
        fields = {field.name: getattr(merged, field.name) for field in dataclasses.fields(Outputs)}
        if any(x.at_head for x in outputs):
            return cls(**fields, parts=tuple(parts))
        logits: list[Any] = [x.logits for x in outputs]
        if logits[0] is None:
            return merged
        back = torch.cat([part.rows for part in parts]).argsort()
        if isinstance(logits[0], tuple):
            both: Any = tuple(torch.cat(ends)[back] for ends in zip(*logits, strict=True))
            return dataclasses.replace(merged, logits=both)
        if len({x.shape[1:] for x in logits}) > 1:
            return cls(**fields, parts=tuple(parts))
        return dataclasses.replace(merged, logits=torch.cat(logits)[back])
