"""What a teacher says about each sample, kept on the disk: a later run needs no teacher."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.atomic_files import create_file, write_file
from fastkd._core.checks import check_positive_int
from fastkd._core.extras import require
from fastkd.distill.backbone import Backbone, Model, placed_for
from fastkd.distill.batch import Batch
from fastkd.distill.blocks import Blocks
from fastkd.distill.lm_head import HeadInputs
from fastkd.distill.method import Method
from fastkd.distill.outputs import HeadOutput, Outputs, model_outputs, pooled_rows
from fastkd.distill.predictions import MULTI_LABEL, REGRESSION
from fastkd.head import Head, LowRank

FORMAT = 7
ABOUT = "teacher.json"
HEAD = "head.safetensors"
SPANS = ("start", "end")
FACTS = (
    "class_name", "num_layers", "hidden_size", "has_head", "output_size", "per_token",
    "sentence_last", "problem", "predicts_words", "writes", "class_labels", "first_position",
)  # fmt: skip

# Inputs that say which tokens are real and where documents begin: padding and packing, which are
# no batch of a sample. Positions are, see `sample_keys`.
LAYOUT = (
    "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k",
)  # fmt: skip
# Entries of a configuration that change no output of the model, or that a model changes itself.
# The attention implementation is recorded apart.
NOT_COMPUTED = (
    "_name_or_path", "architectures", "auto_mapping", "base_model_name_or_path", "dtype",
    "finetuning_task", "id2label", "inference_mode", "init_lora_weights", "initializer_factor",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states",
    "output_router_logits", "peft_version", "problem_type", "return_dict", "revision",
    "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


class CachedModel(Model):
    """What a method asks about a teacher that isn't there."""

    def __init__(self, facts: dict[str, Any]) -> None:
        for name in FACTS:
            setattr(self, name, facts[name])

    def check_eager(self, method: str) -> None:
        raise ValueError(
            f"{method} compares attention maps, which a teacher's cache doesn't keep; pass the "
            "teacher itself"
        )


class TeacherCache(nn.Module):
    """A teacher's outputs in a folder, to be used in its place: ``Distiller(TeacherCache(path),
    student, method)``.

    `Distiller.cache_teacher` writes it. Kept is what the method needs: hidden states of its layers
    at real tokens, or one row a sample where it pools; logits where soft targets count, for
    language models what their head reads of each token, and the head once. Samples are known by
    their tokens and what else the teacher reads of them (images, boxes), so they may come in
    another order, batch or padding; in the same batches the student learns bit for bit what it
    learns from the teacher itself (of words whose logits are kept, not the head, with
    ``keep_logits=True``).

    Args:
        path: the folder.
        teacher, tokenizer: where they are at hand, to make sure that the cache is theirs.

    Raises:
        FileNotFoundError: there is no cache.
        ValueError: it is of another teacher or tokenizer, or a file is not what was written; all
            are read for that, once a process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        teacher: nn.Module | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        if not (self.path / ABOUT).is_file():
            raise FileNotFoundError(
                f"{self.path} holds no teacher's cache ({ABOUT}); write one with "
                "distiller.cache_teacher(batches, path)"
            )
        self.about = _read_about(self.path)
        self.model = CachedModel(self.about["model"])
        self._check_written_by(teacher, tokenizer)
        if self.about["head"]:
            _check_whole(self.path / HEAD, self.about["head"]["digest"])
            for name, value in _safetensors().torch.load_file(self.path / HEAD).items():
                self.register_buffer(f"head_{name}", value, persistent=False)
        self._rows: dict[bytes, tuple[Path, int, int]] = {}
        self._shards: dict[Path, Any] = {}
        self.reload()

    def _check_written_by(self, teacher: nn.Module | None, tokenizer: Any) -> None:
        written, given = self.about["fingerprint"], dict(self.about["fingerprint"])
        configuration = self.about["configuration"]
        if teacher is not None:
            given["teacher"] = _weights_digest(teacher)
            configuration = _configuration(teacher)
        if None not in (tokenizer, written["tokenizer"]):
            given["tokenizer"] = _tokenizer_digest(tokenizer)
        for what, old, new in (
            ("configuration of the teacher", self.about["configuration"], configuration),
            *((name, written[name], given[name]) for name in written),
        ):
            if old != new:
                raise ValueError(
                    f"{self.path} was written with another {_difference(what, old, new)}; write "
                    "another cache"
                )

    def reload(self) -> None:
        """Read the shards that other processes have written since.

        Raises:
            ValueError: a file is not what was written, or belongs to another cache.
        """
        for path in sorted(self.path.glob("shard-*.safetensors")):
            if path in self._shards:
                continue
            _check_whole(path, path.stem.removeprefix("shard-"))
            shard = _safetensors().safe_open(path, "pt")
            if (shard.metadata() or {}).get("description") != self.about["digest"]:
                raise ValueError(
                    f"{path} belongs to a cache of another description than {self.path / ABOUT}; "
                    "delete the folder, and write the cache again"
                )
            self._shards[path] = shard
            keys = shard.get_tensor("keys").numpy()
            ends = shard.get_tensor("lengths").cumsum(0).tolist()
            for i, key in enumerate(keys):
                # Where the sample's tokens begin; its number.
                start = ends[i - 1] if i else 0
                self._rows[key.tobytes()] = path, start, i

    @property
    def digest(self) -> str:
        """That of all that the cache holds."""
        names = sorted(path.name for path in self._shards)
        return _digest(json.dumps([self.about["digest"], *names]).encode())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __getstate__(self) -> dict[str, Any]:
        # Open files can't be copied to another process.
        return {**self.__dict__, "_shards": {}}

    def _shard(self, path: Path) -> Any:
        if path not in self._shards:
            self._shards[path] = _safetensors().safe_open(path, "pt")
        return self._shards[path]

    def serve(self, built: Method) -> None:
        """Raise unless the cache keeps what a method wants; a choice of layers is the cache's."""
        kept = self.about["kept"]
        if not built.prepared:
            if len(kept["layers"]) != len(built.student_layers):
                raise ValueError(
                    f"{self.path} keeps teacher layers {kept['layers']}, which are not one for "
                    f"each of the {len(built.student_layers)} student layers"
                )
            built.teacher_layers = kept["layers"]
        method, wanted = type(built).__name__, teacher_request(built)
        if wanted["inside"]:
            self.model.check_eager(method)
        missing = sorted(set(wanted["layers"]) - set(kept["layers"]))
        if missing:
            raise ValueError(
                f"{method} compares teacher layers {wanted['layers']}, but {self.path} keeps only "
                f"{kept['layers']}; write another cache"
            )
        if wanted["layers"] and kept["pool"] not in ("tokens", wanted["pool"]):
            raise ValueError(
                f"{method} compares {wanted['pool']!r} of the teacher's hidden states, but "
                f"{self.path} keeps {kept['pool']!r}; write another cache"
            )
        if wanted["logits"] and not kept["logits"]:
            raise ValueError(
                f"{method} has soft targets, but {self.path} keeps no logits; write another cache"
            )

    def _head(self) -> Head:
        about, tensors = self.about["head"], dict(self.named_buffers())
        head = Head(
            tensors["head_weight"], tensors.get("head_bias"), about["scale"], about["softcap"]
        )
        head.low_rank = tuple(
            LowRank(tensors[f"head_down_{i}"], tensors[f"head_up_{i}"], scale)
            for i, scale in enumerate(about["low_rank"])
        )
        return head

    def outputs(self, batch: Batch, wanted: dict[str, Any], device: torch.device) -> Outputs:
        """The teacher's outputs on a batch, as if it had run."""
        keys, mask = sample_keys(batch, self.model)
        lengths = mask.sum(1).tolist()
        found = [self._rows.get(key) for key in keys]
        if None in found:
            row = found.index(None)
            raise KeyError(
                f"sample {row} of the batch is not in {self.path} ({len(self)} samples of "
                f"{self.about['model']['class_name']}); it was written from other data or with "
                "another tokenizer"
            )

        columns = _columns(self.about)

        def read(name: str, places: Tensor) -> Tensor:
            parts = []
            for length, (path, start, number) in zip(lengths, found, strict=True):  # type: ignore[misc]
                rows = self._shard(path).get_slice(name)
                first, count = (start, length) if columns[name] else (number, 1)
                parts.append(rows[first : first + count])
            if not parts:  # a batch without samples: none of any row
                path = next(iter(self._rows.values()))[0]
                parts.append(self._shard(path).get_slice(name)[:1][:0])
            rows = torch.cat(parts).to(device, non_blocking=True)
            return _placed(rows, places) if columns[name] else rows

        pooled = self.about["kept"]["pool"] != "tokens"
        hidden = {layer: read(f"hidden.{layer}", mask) for layer in wanted["layers"]}
        if pooled:
            hidden = {layer: rows[:, None] for layer, rows in hidden.items()}
        logits: Any = None
        head_inputs: HeadInputs | None = None
        if wanted["logits"]:
            raw = batch.token_mask
            if self.about["head"]:
                head_inputs = HeadInputs(read(self.about["head"]["states"], raw), self._head())
            elif self.about["spans"]:
                logits = tuple(read(name, raw) for name in SPANS)
            else:
                logits = read("logits", raw)
                if not columns["logits"] and _choices(batch):
                    logits = logits.view(batch.inputs["input_ids"].shape[:2])
        return Outputs(hidden, logits, pooled=pooled, head_inputs=head_inputs)


def _columns(about: dict[str, Any]) -> dict[str, bool]:
    """What a cache keeps, and whether of each real token or once a sample."""
    kept = about["kept"]
    columns = {f"hidden.{layer}": kept["pool"] == "tokens" for layer in kept["layers"]}
    if about["head"]:
        columns[about["head"]["states"]] = True
    elif kept["logits"] and about["spans"]:
        columns |= dict.fromkeys(SPANS, True)
    elif kept["logits"]:
        columns["logits"] = about["model"]["per_token"]
    return columns


def teacher_request(method: Method) -> dict[str, Any]:
    """What a method reads of the teacher."""
    wanted = method.layer_request("teacher")
    return {
        "layers": sorted(set(wanted.layers)),
        "pool": method.teacher_pool,
        "logits": method.compares_logits(0.0, 1.0),
        "inside": bool(wanted.attentions or wanted.qkv),
    }


def sample_keys(batch: Batch, teacher: Model) -> tuple[list[bytes], Tensor]:
    """A digest of all that the teacher reads of each sample, and which tokens (S, L) are real.

    Padding around a sample and its place in a packed row leave its key as it is. Positions other
    than the teacher's own and masked tokens between real ones change it. Waits for the device.
    """
    ids = batch.inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError("a teacher's cache knows samples by their input_ids; pass them")
    if "decoder_input_ids" in batch.inputs:
        return _written_keys(batch)
    tokens, documents = ids.flatten(0, -2), batch.documents
    mask = batch.mask if documents is None else documents.mask
    whole = torch.ones(tokens.shape, dtype=torch.bool, device="cpu")
    mask = whole if mask is None else mask.cpu()
    digests = [hashlib.blake2b(digest_size=16) for _ in mask]
    ends = _ends(mask)
    # Documents keep their real tokens alone; a row as it is, the masked ones between these too.
    kept: Any = list(map(slice, ends)) if documents is None else mask
    others = {n: x for n, x in batch.model_inputs.items() if isinstance(x, Tensor)}
    positions = _positions_of(batch, tokens.shape)
    for name in ["input_ids", *sorted(others.keys() - {"input_ids", *LAYOUT})]:
        x = others[name]
        by_rows = x.shape[: ids.dim() - 1] == ids.shape[:-1]
        x = x.flatten(0, ids.dim() - 2) if by_rows else x
        by_tokens = by_rows and x.shape[:2] == tokens.shape
        if not by_rows or (documents is not None and documents.packed and not by_tokens):
            raise ValueError(f"a teacher's cache can't tell which sample {name} belongs to")
        x = documents.unpack(x) if by_tokens and documents is not None else x
        x = x.cpu() if x.is_floating_point() else x.cpu().long()
        for digest, row, tokens_kept in zip(digests, x, kept, strict=True):
            row = row[tokens_kept] if by_tokens else row
            digest.update(b"" if name == "input_ids" else name.encode())
            digest.update(_bytes_of(row))
    ids = tokens if documents is None else documents.unpack(tokens)
    usual = _usual_positions(ids.cpu(), teacher.first_position)
    for i, digest in enumerate(digests):
        _add_mask(digest, mask[i, : ends[i]])
        if positions is None:
            continue
        given, expected = positions[i][kept[i]], usual[i][kept[i]]
        expected = expected.view(-1, *[1] * (given.dim() - 1)).expand_as(given)
        if not torch.equal(given, expected):
            # Without a mask transformers takes positions that jump for those of several documents.
            masked = b"masked" if "attention_mask" in others else b""
            digest.update(b"position_ids" + masked + _bytes_of(given))
    return [digest.digest() for digest in digests], mask


def _ends(mask: Tensor) -> list[int]:
    """Number of tokens of each row (S, L) up to the last real one."""
    places = torch.arange(1, mask.shape[1] + 1, device="cpu")
    ends: list[int] = (mask * places).amax(1).tolist()
    return ends


def _usual_positions(ids: Tensor, first: int) -> Tensor:
    """Positions (S, L) that a model numbers its tokens by where it is given none."""
    if first == 0:
        return torch.arange(ids.shape[1], device="cpu").expand(ids.shape)
    padding = first - 1  # a token with this id takes its number for position, and isn't counted
    real = ids != padding
    usual: Tensor = real.cumsum(1) * real + padding
    return usual


def _positions_of(batch: Batch, shape: torch.Size) -> Tensor | None:
    """``position_ids`` of each sample's tokens, (S, L) or (S, L, 3); None where there are none."""
    x = batch.inputs.get("position_ids")
    if not isinstance(x, Tensor):
        return None
    if x.dim() == 3 and x.shape[1:] == shape:  # several a token (M-RoPE)
        x = x.movedim(0, -1)
    elif x.numel() in (shape[1], shape.numel()):
        x = x.reshape(-1, shape[1]).expand(shape)
    else:
        raise ValueError("a teacher's cache can't tell which sample position_ids belongs to")
    x = x if batch.documents is None else batch.documents.unpack(x)
    return x.cpu().long()


def _add_mask(digest: Any, real: Tensor) -> None:
    """Add a sample's mask to its digest if tokens before its last are masked."""
    if not real.all():
        digest.update(b"attention_mask" + _bytes_of(real))


def _bytes_of(x: Tensor) -> bytes:
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _written_keys(batch: Batch) -> tuple[list[bytes], Tensor]:
    """Keys of encoder-decoders: what the encoder reads, and the decoder up to the last token that
    counts."""
    inputs = batch.model_inputs
    mask, words = batch.token_mask.cpu(), inputs["decoder_input_ids"].cpu().long()
    ids = inputs["input_ids"].cpu().long()
    read, heard = (
        torch.ones_like(x, dtype=torch.bool, device="cpu") if given is None else given.cpu().bool()
        for x, given in (
            (ids, inputs.get("attention_mask")), (words, inputs.get("decoder_attention_mask"))
        )
    )  # fmt: skip
    known = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
    others = sorted({name for name, x in inputs.items() if isinstance(x, Tensor)} - known)
    if others:
        raise ValueError(
            f"a teacher's cache can't tell which sample of an encoder-decoder {others[0]} "
            "belongs to"
        )
    keys = []
    for i, (stop, end) in enumerate(zip(_ends(read), _ends(mask), strict=True)):
        digest = hashlib.blake2b(_bytes_of(ids[i, :stop]), digest_size=16)
        _add_mask(digest, read[i, :stop])
        digest.update(b"decoder" + _bytes_of(words[i, :end]) + _bytes_of(mask[i, :end]))
        _add_mask(digest, heard[i, :end])
        keys.append(digest.digest())
    return keys, mask


def write_cache(
    teacher: Backbone,
    method: Method,
    parts: Iterable[Batch],
    path: str | os.PathLike[str],
    tokenizer: Any,
    shard_bytes: int,
) -> TeacherCache:
    """See `Distiller.cache_teacher`."""
    check_positive_int("shard_bytes", shard_bytes)
    teacher.model.eval()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    writer: _Writer | None = None
    known: set[bytes] = set()
    for batch in parts:
        if batch.teacher is not None:
            raise ValueError(
                "the teacher has inputs of its own (teacher_...), and a cache knows samples by the "
                "student's; leave them out of the batches"
            )
        keys, mask = sample_keys(batch, teacher)
        if writer is None:
            writer = _Writer(teacher, method, folder, tokenizer, shard_bytes, batch)
            known = set(writer.cache._rows)
        if known.issuperset(keys):
            continue
        writer.add(batch, keys, mask, known)
        known.update(keys)
    if writer is None:
        raise ValueError("batches is empty; there is nothing to keep")
    writer.flush()
    return TeacherCache(folder)


class _Writer:
    """Collects rows and writes them in shards, each complete or not there at all."""

    def __init__(
        self,
        teacher: Backbone,
        method: Method,
        folder: Path,
        tokenizer: Any,
        shard_bytes: int,
        first: Batch,
    ) -> None:
        self.teacher, self.method = teacher, method
        self.folder, self.shard_bytes = folder, shard_bytes
        self.wanted = teacher_request(method)
        if self.wanted["inside"]:
            CachedModel(_facts(teacher)).check_eager(type(method).__name__)
        outputs, words = self._run(first, words=True)
        about_head, head_data = None, None
        if words is not None:
            head_data = _safetensors().torch.save(_tensors_of(words.head))
            about_head = {
                "digest": _digest(head_data),
                "states": self._column_of(words.states, outputs),
                "scale": words.head.scale,
                "softcap": words.head.softcap,
                "low_rank": [batch.scale for batch in words.head.low_rank],
            }
        about = {
            "format": FORMAT,
            "model": _facts(teacher),
            "kept": {name: self.wanted[name] for name in ("layers", "pool", "logits")},
            "head": about_head,
            "spans": isinstance(outputs.logits, tuple),
            "precision": _precision(teacher.model),
            "configuration": _configuration(teacher.model),
            "fingerprint": {
                "teacher": _weights_digest(teacher.model),
                "tokenizer": _tokenizer_digest(tokenizer),
            },
        }
        about["digest"] = _about_digest(about)
        self.about: dict[str, Any] = about
        if not (folder / ABOUT).is_file():
            create_file(folder / ABOUT, json.dumps(about, indent=1))
        # Another process may have created it.
        _check_same(folder, _read_about(folder), about)
        if head_data is not None and not (folder / HEAD).is_file():
            write_file(folder / HEAD, head_data, shared=True)
        self.cache = TeacherCache(folder)
        self.columns: dict[str, list[Tensor]] = {}
        self.size = 0

    def _column_of(self, states: Tensor, outputs: Outputs) -> str:
        """Where what the head reads is kept: it may be hidden states that are compared as well."""
        last = None if self.teacher.no_layers else self.teacher.num_layers
        if self.wanted["pool"] == "tokens" and last in outputs.hidden:
            hidden = outputs.hidden[last]
            if hidden.dtype == states.dtype and torch.equal(hidden, states.to(hidden.device)):
                return f"hidden.{last}"
        return "states"

    def _run(self, batch: Batch, words: bool) -> tuple[Outputs, HeadInputs | None]:
        """The teacher on the batch as it is, whose rows are taken apart later.

        With ``words`` what its head reads and the head, in the place of logits, if it has one.
        """
        reads = self.wanted["logits"]
        wanted = self.method.layer_request("teacher")
        inputs = placed_for(self.teacher.model, batch.model_inputs)
        head: HeadOutput = "none"
        if reads:
            head = "inputs" if words else "logits"
        with torch.no_grad():
            outputs = model_outputs(self.teacher, inputs, wanted, head)
        rest = dataclasses.replace(outputs, head_inputs=None)  # the head keeps its device
        return rest.to(batch.token_mask.device), outputs.head_inputs

    def add(self, batch: Batch, keys: list[bytes], mask: Tensor, known: set[bytes]) -> None:
        """The rows of a batch that aren't known."""
        head, pool = self.about["head"], self.wanted["pool"]
        outputs, words = self._run(batch, words=bool(head))
        found = {f"hidden.{layer}": outputs.hidden[layer] for layer in self.wanted["layers"]}
        if pool != "tokens":
            unpack = (lambda x: x) if batch.documents is None else batch.documents.unpack
            for name, x in found.items():
                found[name] = pooled_rows(pool, self.teacher, unpack(x), batch.feature_mask)
        if words is not None:
            found[head["states"]] = words.states.to(batch.token_mask.device)
        elif isinstance(outputs.logits, tuple):
            found |= zip(SPANS, outputs.logits, strict=True)
        elif outputs.logits is not None:
            logits = outputs.logits
            found["logits"] = logits.flatten()[:, None] if _choices(batch) else logits
        elif self.wanted["logits"]:
            raise ValueError(f"{self.teacher.class_name} returns no logits to keep")
        raw, lengths, columns = batch.token_mask, mask.sum(1).tolist(), _columns(self.about)
        rows = {
            name: x[raw].cpu().split(lengths) if columns[name] else x.cpu().split(1)
            for name, x in found.items()
        }
        for i, key in enumerate(keys):
            if key in known or key in keys[:i]:
                continue
            self._append("keys", torch.frombuffer(bytearray(key), dtype=torch.uint8)[None])
            self._append("lengths", torch.tensor([lengths[i]]))
            for name, parts in rows.items():
                self._append(name, parts[i])
        if self.size >= self.shard_bytes:
            self.flush()

    def _append(self, name: str, x: Tensor) -> None:
        self.columns.setdefault(name, []).append(x)
        self.size += x.nbytes

    def flush(self) -> None:
        """Write what was collected."""
        if not self.columns:
            return
        tensors = {name: torch.cat(parts).contiguous() for name, parts in self.columns.items()}
        data = _safetensors().torch.save(tensors, {"description": self.about["digest"]})
        path = self.folder / f"shard-{_digest(data)}.safetensors"
        write_file(path, data, shared=True)
        self.columns, self.size = {}, 0


def _tensors_of(head: Head) -> dict[str, Tensor]:
    tensors = {"weight": head.weight, "bias": head.bias}
    for i, batch in enumerate(head.low_rank):
        tensors |= {f"down_{i}": batch.down, f"up_{i}": batch.up}
    return {n: x.detach().cpu().contiguous() for n, x in tensors.items() if x is not None}


def _choices(batch: Batch) -> bool:
    """Whether samples are the choices (B, C, N) of questions, each with one logit."""
    return bool(batch.inputs["input_ids"].dim() == 3)


def _placed(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows of real tokens (T, ...) at their places in (B, N, ...), zeros elsewhere."""
    mask = mask.to(rows.device)
    return rows.new_zeros(*mask.shape, *rows.shape[1:]).index_put((mask,), rows)


def _facts(teacher: Backbone) -> dict[str, Any]:
    unknown = () if teacher.sizes else ("num_layers", "hidden_size")
    facts = {name: None if name in unknown else getattr(teacher, name) for name in FACTS}
    kept = (REGRESSION, MULTI_LABEL)  # of classes transformers notes it when it first sees labels
    return {**facts, "problem": facts["problem"] if facts["problem"] in kept else None}


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT).read_text())
    except ValueError:
        about = None
    if isinstance(about, dict) and about.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{folder} has format {about['format']}, this fastkd reads {FORMAT}; write it again"
        )
    if not isinstance(about, dict) or about.get("digest") != _about_digest(about):
        raise ValueError(
            f"{folder / ABOUT} is not what was written; delete the folder, and write the cache "
            "again"
        )
    return about


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise, naming what differs, unless a run may add to a cache."""
    for section in (
        "format", "model", "kept", "precision", "configuration", "head", "spans", "fingerprint",
    ):  # fmt: skip
        if old[section] != new[section]:
            raise ValueError(
                f"{folder} was written otherwise "
                f"({_difference(section, old[section], new[section])}); choose another folder or "
                "delete it"
            )


def _difference(what: str, old: Any, new: Any) -> str:
    """The entries that differ, as text."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        what = f"{what}: {', '.join(names)}"
        old, new = ([values.get(name) for name in names] for values in (old, new))
    return f"{what}: {old}, now {new}"


def _precision(model: nn.Module) -> str:
    """How the teacher computes, besides what its weights say."""
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    if not torch.is_autocast_enabled(device):
        return "that of the weights"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _configuration(model: nn.Module) -> dict[str, Any]:
    """What a teacher's outputs depend on besides its weights, by name.

    Of a transformers model the configuration, the attention implementation and the adapters'
    configurations; of another, a digest of the types and plain attributes of its modules.
    """
    inner: Any = model.model if isinstance(model, Blocks) else model
    inner = getattr(inner, "_orig_mod", inner)
    adapters = getattr(inner, "peft_config", {})
    config: Any = getattr(inner, "config", None)
    found: dict[str, Any] = {}
    if hasattr(config, "to_dict"):
        found = {**_flat(config.to_dict()), "attention": config._attn_implementation}
    if isinstance(model, Blocks) or not found:
        found["modules"] = _modules_digest(model)
    for name, adapter in adapters.items():
        found |= _flat({f"adapter {name}": adapter.to_dict()})
    if adapters:
        found["active adapters"] = inner.active_adapters
    read_back: dict[str, Any] = json.loads(json.dumps(found, default=_as_json))
    return read_back


def _flat(entries: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries that change outputs, those of nested dicts by dotted names."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if name in NOT_COMPUTED:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _as_json(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set) else str(value)


def _modules_digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module).__qualname__}".encode())
        for attribute, value in sorted(vars(module).items()):
            if attribute != "training" and not attribute.startswith("_"):
                digest.update(f"{attribute} {_plain(value)}".encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Numbers, words and names of functions; nothing of other objects."""
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    return getattr(value, "__qualname__", None) if callable(value) else None


def _about_digest(about: dict[str, Any]) -> str:
    rest = {name: value for name, value in about.items() if name != "digest"}
    return _digest(json.dumps(rest, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _check_whole(path: Path, digest: str) -> None:
    """Raise unless a file is what was written."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; write the cache again, which adds what is missing"
        )
    state = path.stat()
    if _file_digest(path, state.st_mtime_ns, state.st_size) != digest:
        raise ValueError(
            f"{path} is not what was written; delete it, and write the cache again, which adds "
            "what is missing"
        )


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, changed: int, size: int) -> str:
    """That of a file as it was then."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _weights_digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()


def _safetensors() -> Any:
    require("safetensors.torch", "train")
    return require("safetensors", "train")
