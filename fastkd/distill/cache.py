"""Cache of a teacher's outputs on disk, one entry per sample: later runs need no teacher."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fastkd._core import check
from fastkd._core.atomic_files import create_file, write_file
from fastkd._core.extras import require
from fastkd.distill.method import Method
from fastkd.distill.prediction_losses import MULTI_LABEL, REGRESSION
from fastkd.lm.heads import Head, LowRank
from fastkd.lm.targets import TopK
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Backbone, Blocks, Model, placed_for
from fastkd.models.batch import Batch, with_sentence
from fastkd.models.hooks import HeadInputs, on_device
from fastkd.models.outputs import HeadOutput, Outputs, model_outputs, pooled_rows

FORMAT = 8
ABOUT = "teacher.json"
HEAD = "head.safetensors"
TOP_K = ("top_k.ids", "top_k.log_probs")
SPANS = ("start", "end")
FACTS = (
    "class_name", "num_layers", "hidden_size", "has_head", "output_size", "per_token",
    "sentence_last", "problem", "predicts_words", "writes", "class_labels", "first_position",
)  # fmt: skip

# Inputs that describe padding and packing. They are not part of a sample's key, except for
# positions: see `sample_keys`.
LAYOUT = (
    "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k",
)  # fmt: skip
# Configuration entries that change no output, or that a model changes itself. The attention
# implementation is stored separately.
NOT_COMPUTED = (
    "_name_or_path", "architectures", "auto_mapping", "base_model_name_or_path", "dtype",
    "finetuning_task", "id2label", "inference_mode", "init_lora_weights", "initializer_factor",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states",
    "output_router_logits", "peft_version", "problem_type", "return_dict", "revision",
    "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


class CachedModel(Model):
    """Properties of a cached teacher."""

    def __init__(self, facts: dict[str, Any]) -> None:
        for name in FACTS:
            setattr(self, name, facts[name])
        self.head_padding, self.head_end = facts.get("head_padding"), facts.get("head_end")

    def check_eager(self, method: str) -> None:
        raise ValueError(
            f"{method} compares attention maps, which a teacher cache does not store; pass the "
            "teacher itself"
        )


class TeacherCache(nn.Module):
    """Stored outputs of a teacher, used in its place: ``Distiller(TeacherCache(path), student,
    method)``.

    `Distiller.cache_teacher` writes it and stores what the method needs: hidden states of the
    method's layers at real tokens, or one row per sample if the method pools; logits if the method
    has soft targets. For language models it stores the head once and the head's inputs of each
    token, or with ``top_k`` the ids and log-probabilities of the most probable tokens, 8 bytes
    each. The key of a sample is computed from its tokens and all other inputs of the teacher
    (images, boxes), or from its own inputs, so samples may be read in another order, batch or
    padding. With the same
    batches the student learns bit for bit what it learns from the teacher itself (with
    ``keep_logits=True`` if logits over a vocabulary are stored instead of the head).

    Args:
        path: the folder.
        teacher, tokenizer: if passed, the cache is checked to be written with them.

    Raises:
        FileNotFoundError: ``path`` holds no cache.
        ValueError: the cache was written with another teacher or tokenizer, or a file was changed.
            Every file is read for this check, once per process.
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
                f"{self.path} holds no teacher cache ({ABOUT}); write one with "
                "distiller.cache_teacher(batches, path)"
            )
        self.about = _read_about(self.path)
        self.model = CachedModel(self.about["model"])
        self._check_written_by(teacher, tokenizer)
        if self.about["head"]:
            _check_unchanged(self.path / HEAD, self.about["head"]["digest"])
            for name, value in _safetensors().torch.load_file(self.path / HEAD).items():
                self.register_buffer(f"head_{name}", value, persistent=False)
        self._rows: dict[bytes, tuple[Path, int, int]] = {}
        self._shards: dict[Path, Any] = {}
        self.reload()

    def _check_written_by(self, teacher: nn.Module | None, tokenizer: Any) -> None:
        what, given = "configuration of the teacher", dict[str, Any]()
        written = {what: self.about["configuration"], **self.about["fingerprint"]}
        if teacher is not None:
            given = {what: _configuration(teacher), "teacher": _weights_digest(teacher)}
        if None not in (tokenizer, written["tokenizer"]):
            given["tokenizer"] = _tokenizer_digest(tokenizer)
        for what, new in given.items():
            if (old := written[what]) != new:
                raise ValueError(
                    f"{self.path} was written with another {_difference(what, old, new)}; write "
                    "another cache"
                )

    def reload(self) -> None:
        """Read the shards that other processes have written since the last call.

        Raises:
            ValueError: a file was changed or belongs to another cache.
        """
        for path in sorted(self.path.glob("shard-*.safetensors")):
            if path in self._shards:
                continue
            _check_unchanged(path, path.stem.removeprefix("shard-"))
            shard = _safetensors().safe_open(path, "pt")
            if (shard.metadata() or {}).get("description") != self.about["digest"]:
                raise ValueError(
                    f"{path} does not belong to the cache that {self.path / ABOUT} describes; "
                    "delete the folder, and write the cache again"
                )
            self._shards[path] = shard
            keys = shard.get_tensor("keys").numpy()
            ends = shard.get_tensor("lengths").cumsum(0).tolist()
            for i, key in enumerate(keys):
                # Offset of the sample's tokens, and its index in the shard.
                start = ends[i - 1] if i else 0
                self._rows[key.tobytes()] = path, start, i

    @property
    def digest(self) -> str:
        """Digest of the cache's whole content."""
        names = sorted(path.name for path in self._shards)
        return _digest(json.dumps([self.about["digest"], *names]).encode())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __getstate__(self) -> dict[str, Any]:
        # Open files can't be pickled.
        return {**self.__dict__, "_shards": {}}

    def _shard(self, path: Path) -> Any:
        if path not in self._shards:
            self._shards[path] = _safetensors().safe_open(path, "pt")
        return self._shards[path]

    def serve(self, built: Method, model: Model) -> None:
        """Raise unless the cache stores what a method reads; set layers chosen from data.

        ``model`` has the properties of the teacher in a Distiller, such as its vocabulary.
        """
        kept = self.about["kept"]
        if not built.prepared:
            if len(kept["layers"]) != len(built.student_layers):
                raise ValueError(
                    f"{self.path} stores teacher layers {kept['layers']} for "
                    f"{len(built.student_layers)} student layers; write another cache"
                )
            built.teacher_layers = kept["layers"]
        method, wanted = type(built).__name__, teacher_request(built)
        if wanted["inside"]:
            self.model.check_eager(method)
        missing = sorted(set(wanted["layers"]) - set(kept["layers"]))
        if missing:
            raise ValueError(
                f"{method} compares teacher layers {wanted['layers']}, but {self.path} stores only "
                f"{kept['layers']}; write another cache"
            )
        if wanted["layers"] and kept["pool"] not in ("tokens", wanted["pool"]):
            raise ValueError(
                f"{method} compares {wanted['pool']!r} of the teacher's hidden states, but "
                f"{self.path} stores {kept['pool']!r}; write another cache"
            )
        if wanted["logits"] and not kept["logits"]:
            raise ValueError(
                f"{method} has soft targets, but {self.path} stores no logits; write another cache"
            )
        top = self.about["top_k"] if wanted["logits"] else None
        if top and built.merges_spans:
            raise ValueError(
                f"{method} compares all tokens of the teacher, but {self.path} stores the "
                f"{top['k']} most probable ones; write another cache, without top_k"
            )
        if top and top["temperature"] != _temperature(built):
            raise ValueError(
                f"{method} has temperature {_temperature(built)}, but {self.path} stores "
                f"log-probabilities at {top['temperature']}; write another cache"
            )
        shared = model.vocabulary
        if top and isinstance(shared, VocabularyMatch) and model.unmatched != "bucket":
            raise ValueError(
                f"unmatched={model.unmatched!r}: {self.path} stores the teacher's top k, in which "
                "unmatched and improbable tokens are one outcome; pass unmatched='bucket', or "
                "write a cache without top_k"
            )
        n = shared if isinstance(shared, int) else model.output_size
        if top and n != top["vocabulary"]:
            raise ValueError(
                f"tokenizers: student and teacher share {n} tokens, but {self.path} stores "
                f"log-probabilities of {top['vocabulary']}; write another cache with this student"
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
        """The teacher's outputs on a batch, read from the cache."""
        keys, mask = sample_keys(batch, self.model)
        lengths = mask.sum(1).tolist()
        found = [self._rows.get(key) for key in keys]
        if None in found:
            row = found.index(None)
            raise KeyError(
                f"sample {row} of the batch is not in {self.path} ({len(self)} samples of "
                f"{self.about['model']['class_name']}); pass the data and tokenizer that the cache "
                "was written with"
            )

        columns = _columns(self.about)

        def read(name: str, positions: Tensor) -> Tensor:
            samples = []
            for length, (path, start, number) in zip(lengths, found, strict=True):  # type: ignore[misc]
                rows = self._shard(path).get_slice(name)
                first, count = (start, length) if columns[name] else (number, 1)
                samples.append(rows[first : first + count])
            if not samples:  # a batch without samples: no rows of the first shard
                path = next(iter(self._rows.values()))[0]
                samples.append(self._shard(path).get_slice(name)[:1][:0])
            rows = torch.cat(samples).to(device, non_blocking=True)
            return scatter(rows, positions) if columns[name] else rows

        pooled = self.about["kept"]["pool"] != "tokens"
        hidden = {layer: read(f"hidden.{layer}", mask) for layer in wanted["layers"]}
        if pooled:
            hidden = {layer: rows[:, None] for layer, rows in hidden.items()}
        logits: Any = None
        head_inputs: HeadInputs | None = None
        top_k: TopK | None = None
        if wanted["logits"]:
            raw = batch.token_mask
            if self.about["top_k"]:
                top_k = TopK(read(TOP_K[0], raw), read(TOP_K[1], raw))
            elif self.about["head"]:
                head_inputs = HeadInputs(read(self.about["head"]["states"], raw), self._head())
            elif self.about["spans"]:
                logits = tuple(read(name, raw) for name in SPANS)
            else:
                logits = read("logits", raw)
                if not columns["logits"] and _choices(batch):
                    logits = logits.view(batch.inputs["input_ids"].shape[:2])
        return Outputs(hidden, logits, pooled=pooled, head_inputs=head_inputs, top_k=top_k)


def _columns(about: dict[str, Any]) -> dict[str, bool]:
    """Stored tensors by name: True for one row per real token, False for one row per sample."""
    kept = about["kept"]
    columns = {f"hidden.{layer}": kept["pool"] == "tokens" for layer in kept["layers"]}
    if about["top_k"]:
        columns |= dict.fromkeys(TOP_K, True)
    elif about["head"]:
        columns[about["head"]["states"]] = True
    elif kept["logits"] and about["spans"]:
        columns |= dict.fromkeys(SPANS, True)
    elif kept["logits"]:
        columns["logits"] = about["model"]["per_token"]
    return columns


def teacher_request(method: Method) -> dict[str, Any]:
    """Outputs of the teacher that a method reads."""
    wanted = method.layer_request("teacher")
    return {
        "layers": sorted(set(wanted.layers)),
        "pool": method.teacher_pool,
        "logits": method.compares_logits(0.0, 1.0),
        "inside": bool(wanted.attentions or wanted.qkv),
    }


def _temperature(method: Method) -> float:
    """Temperature of a method's soft targets, or of those of several methods, which must agree."""
    first, *others = sorted(method.soft_temperatures)
    if others:
        raise ValueError(
            f"top_k: the methods have temperatures {[first, *others]}, but a cache stores "
            "log-probabilities at one; give them one temperature, or write a cache without top_k"
        )
    return first


def sample_keys(batch: Batch, teacher: Model) -> tuple[list[bytes], Tensor]:
    """Key of each sample, a digest of the teacher's inputs, and the mask (S, L) of its real tokens.

    A key does not depend on padding around the sample or on its offset in a packed row. It depends
    on positions that differ from the teacher's default and on masked tokens between real ones.
    Waits for the device.
    """
    batch = batch.teacher or batch
    ids = batch.inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(
            "input_ids: none given, but a teacher cache finds samples by them; pass them"
        )
    if "decoder_input_ids" in batch.inputs:
        return _encoder_decoder_keys(batch)
    tokens, documents = ids.flatten(0, -2), batch.documents
    mask = batch.mask if documents is None else documents.mask
    whole = torch.ones(tokens.shape, dtype=torch.bool, device="cpu")
    mask = whole if mask is None else mask.cpu()
    digests = [hashlib.blake2b(digest_size=16) for _ in mask]
    ends = _ends(mask)
    # Of a packed document the real tokens; of a row all tokens up to the last real one.
    packed = documents is not None and documents.packed
    kept: Any = mask if packed else list(map(slice, ends))
    others = {n: x for n, x in batch.model_inputs.items() if isinstance(x, Tensor)}
    positions = _positions_of(batch, tokens.shape)
    for name in ["input_ids", *sorted(others.keys() - {"input_ids", *LAYOUT})]:
        x = others[name]
        by_rows = x.shape[: ids.dim() - 1] == ids.shape[:-1]
        x = x.flatten(0, ids.dim() - 2) if by_rows else x
        by_tokens = by_rows and x.shape[:2] == tokens.shape
        if not by_rows or (packed and not by_tokens):
            raise ValueError(
                f"{name}: a teacher cache can't assign shape {tuple(x.shape)} to samples; pass one "
                "entry per sample"
            )
        x = documents.unpack(x) if by_tokens and documents is not None else x
        x = x.cpu() if x.is_floating_point() else x.cpu().long()
        for digest, row, tokens_kept in zip(digests, x, kept, strict=True):
            row = row[tokens_kept] if by_tokens else row
            digest.update(b"" if name == "input_ids" else name.encode())
            digest.update(_bytes_of(row))
    ids = tokens if documents is None else documents.unpack(tokens)
    default = _default_positions(ids.cpu(), teacher.first_position)
    for i, digest in enumerate(digests):
        _add_mask(digest, mask[i, : ends[i]])
        if positions is None:
            continue
        given, expected = positions[i][kept[i]], default[i][kept[i]]
        expected = expected.view(-1, *[1] * (given.dim() - 1)).expand_as(given)
        if not torch.equal(given, expected):
            # Without a mask transformers reads jumps of the positions as borders of documents.
            masked = b"masked" if "attention_mask" in others else b""
            digest.update(b"position_ids" + masked + _bytes_of(given))
    return [digest.digest() for digest in digests], mask


def _ends(mask: Tensor) -> list[int]:
    """Number of tokens of each row (S, L) up to the last real one."""
    places = torch.arange(1, mask.shape[1] + 1, device="cpu")
    ends: list[int] = (mask * places).amax(1).tolist()
    return ends


def _default_positions(ids: Tensor, first: int) -> Tensor:
    """Positions (S, L) that the model uses if none are passed."""
    if first == 0:
        return torch.arange(ids.shape[1], device="cpu").expand(ids.shape)
    padding = first - 1  # tokens with this id are not counted; their position is the id
    real = ids != padding
    positions: Tensor = real.cumsum(1) * real + padding
    return positions


def _positions_of(batch: Batch, shape: torch.Size) -> Tensor | None:
    """``position_ids`` of each sample's tokens, (S, L) or (S, L, 3); None if none were passed."""
    x = batch.inputs.get("position_ids")
    if not isinstance(x, Tensor):
        return None
    if x.dim() == 3 and x.shape[1:] == shape:  # several per token (M-RoPE)
        x = x.movedim(0, -1)
    elif x.numel() in (shape[1], shape.numel()):
        x = x.reshape(-1, shape[1]).expand(shape)
    else:
        raise ValueError(
            f"position_ids: a teacher cache can't assign shape {tuple(x.shape)} to samples; pass "
            "one row per sample"
        )
    x = x if batch.documents is None else batch.documents.unpack(x)
    return x.cpu().long()


def _add_mask(digest: Any, real: Tensor) -> None:
    """Add a sample's mask to its digest if tokens before its last are masked."""
    if not real.all():
        digest.update(b"attention_mask" + _bytes_of(real))


def _bytes_of(x: Tensor) -> bytes:
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _encoder_decoder_keys(batch: Batch) -> tuple[list[bytes], Tensor]:
    """`sample_keys` of encoder-decoders: digests of the encoder's inputs and of the decoder's
    inputs up to the last real token."""
    inputs = batch.model_inputs
    mask, tokens = batch.token_mask.cpu(), inputs["decoder_input_ids"].cpu().long()
    ids = inputs["input_ids"].cpu().long()
    encoder_mask, decoder_mask = (
        torch.ones_like(x, dtype=torch.bool, device="cpu") if given is None else given.cpu().bool()
        for x, given in (
            (ids, inputs.get("attention_mask")), (tokens, inputs.get("decoder_attention_mask"))
        )
    )  # fmt: skip
    known = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
    others = sorted({name for name, x in inputs.items() if isinstance(x, Tensor)} - known)
    if others:
        raise ValueError(
            f"{others[0]}: a teacher cache of an encoder-decoder does not support this input; "
            "leave it out, or pass the teacher itself"
        )
    keys = []
    for i, (stop, end) in enumerate(zip(_ends(encoder_mask), _ends(mask), strict=True)):
        digest = hashlib.blake2b(_bytes_of(ids[i, :stop]), digest_size=16)
        _add_mask(digest, encoder_mask[i, :stop])
        digest.update(b"decoder" + _bytes_of(tokens[i, :end]) + _bytes_of(mask[i, :end]))
        _add_mask(digest, decoder_mask[i, :end])
        keys.append(digest.digest())
    return keys, mask


@dataclass(eq=False)
class CacheWriter:
    """Collects rows and writes shards, each atomically; implements `Distiller.cache_teacher`."""

    teacher: Backbone
    method: Method
    folder: Path
    tokenizer: Any
    shard_bytes: int
    top_k: int | None
    source: Any = None  # an `OutputSource`

    def write(self, batches: Iterable[Batch]) -> TeacherCache:
        """Add the samples of all batches to the cache."""
        check.positive_int("shard_bytes", self.shard_bytes)
        if self.top_k is not None:
            check.positive_int("top_k", self.top_k)
        model = None if self.source is not None else self.teacher.model.eval()
        self.folder.mkdir(parents=True, exist_ok=True)
        known: set[bytes] | None = None
        with on_device(model):
            for batch in batches:
                keys, mask = sample_keys(batch, self.teacher)
                if known is None:
                    self._begin(batch)
                    known = set(self.cache._rows)
                if not known.issuperset(keys):
                    self.add(batch.teacher or batch, keys, mask, known)
                    known.update(keys)
        if known is None:
            raise ValueError("batches: none given; pass at least one batch to store")
        self.flush()
        return TeacherCache(self.folder)

    def _begin(self, first: Batch) -> None:
        """Describe the cache by its first batch, or check that it has this description."""
        teacher, method, folder, top_k = self.teacher, self.method, self.folder, self.top_k
        self.wanted = teacher_request(method)
        if first.spans is not None:  # features of spans are made of the tokens'
            self.wanted["pool"] = "tokens"
        if self.wanted["inside"]:
            CachedModel(_facts(teacher)).check_eager(type(method).__name__)
        outputs, head_inputs = self._run(first.teacher or first, read_head=True)
        about_head, head_data = None, None
        about_top = None
        if top_k is not None:
            if method.merges_spans:
                raise ValueError(
                    f"top_k: {type(method).__name__} compares all tokens of the teacher; leave it "
                    "out"
                )
            if head_inputs is None and outputs.top_k is None:
                raise ValueError(
                    f"top_k: {type(method).__name__} reads no predictions of tokens from "
                    f"{teacher.class_name}'s head; leave it out"
                )
            shared = teacher.vocabulary  # or the match of two vocabularies
            whole = teacher.output_size if head_inputs is None else len(head_inputs.head.weight)
            n: Any = shared if isinstance(shared, int) else whole
            if top_k > n:
                raise ValueError(f"top_k must be at most {n}, the vocabulary, got {top_k}")
            about_top = {"k": top_k, "temperature": _temperature(method), "vocabulary": n}
        elif head_inputs is not None:
            head_data = _safetensors().torch.save(_tensors_of(head_inputs.head))
            about_head = {
                "digest": _digest(head_data),
                "states": self._column_of(head_inputs.states, outputs),
                "scale": head_inputs.head.scale,
                "softcap": head_inputs.head.softcap,
                "low_rank": [factors.scale for factors in head_inputs.head.low_rank],
            }
        about = {
            "format": FORMAT,
            "model": _facts(teacher),
            "kept": {name: self.wanted[name] for name in ("layers", "pool", "logits")},
            "head": about_head,
            "top_k": about_top,
            "spans": isinstance(outputs.logits, tuple),
            **self._identity(),
        }
        about["fingerprint"]["tokenizer"] = _tokenizer_digest(self.tokenizer)
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

    def _identity(self) -> dict[str, Any]:
        """What else the teacher's outputs depend on."""
        if self.source is not None:
            return {
                "precision": "that of the weights",
                "configuration": self.source.configuration(),
                "fingerprint": {"teacher": f"served: {self.teacher.class_name}"},
            }
        model = self.teacher.model
        return {
            "precision": _precision(model),
            "configuration": _configuration(model),
            "fingerprint": {"teacher": _weights_digest(model)},
        }

    def _column_of(self, states: Tensor, outputs: Outputs) -> str:
        """Column of the head's inputs: that of the last hidden states if both tensors are equal."""
        last = None if self.source or self.teacher.no_layers else self.teacher.num_layers
        if self.wanted["pool"] == "tokens" and last in outputs.hidden:
            hidden = outputs.hidden[last]
            if hidden.dtype == states.dtype and torch.equal(hidden, states.to(hidden.device)):
                return f"hidden.{last}"
        return "states"

    def _run(self, batch: Batch, read_head: bool) -> tuple[Outputs, HeadInputs | None]:
        """The teacher's outputs on the batch, and its head inputs instead of logits if it can
        and ``read_head`` is true.
        """
        if self.source is not None:
            outputs = self.source.outputs(batch, self.wanted, batch.token_mask.device)
        else:
            inputs = placed_for(self.teacher.model, batch.model_inputs)
            head: HeadOutput = "none"
            if self.wanted["logits"]:
                head = "inputs" if read_head else "logits"
            with torch.no_grad():
                request = self.method.layer_request("teacher")
                outputs = model_outputs(self.teacher, inputs, request, head)
        rest = dataclasses.replace(outputs, head_inputs=None)  # the head keeps its device
        return rest.to(batch.token_mask.device), outputs.head_inputs

    def add(self, batch: Batch, keys: list[bytes], mask: Tensor, known: set[bytes]) -> None:
        """Collect the rows of samples that are not in ``known``."""
        head, top, pool = self.about["head"], self.about["top_k"], self.wanted["pool"]
        outputs, head_inputs = self._run(batch, read_head=bool(head or top))
        found = {f"hidden.{layer}": outputs.hidden[layer] for layer in self.wanted["layers"]}
        if pool != "tokens":
            unpack = (lambda x: x) if batch.documents is None else batch.documents.unpack
            at = with_sentence(outputs, self.teacher, batch.inputs, batch.documents).sentence
            for name, x in found.items():
                found[name] = pooled_rows(pool, self.teacher, unpack(x), batch.feature_mask, at)
        if outputs.top_k is not None:
            found |= zip(TOP_K, (outputs.top_k.ids.int(), outputs.top_k.log_probs), strict=True)
        elif head_inputs is not None and top:
            found |= zip(TOP_K, self._top_k(head_inputs, batch.token_mask), strict=True)
        elif head_inputs is not None:
            found[head["states"]] = head_inputs.states.to(batch.token_mask.device)
        elif isinstance(outputs.logits, tuple):
            found |= zip(SPANS, outputs.logits, strict=True)
        elif outputs.logits is not None:
            logits = outputs.logits
            found["logits"] = logits.flatten()[:, None] if _choices(batch) else logits
        elif self.wanted["logits"]:
            raise ValueError(f"{self.teacher.class_name} returns no logits; load it with its head")
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
            for name, samples in rows.items():
                self._append(name, samples[i])
        if self.size >= self.shard_bytes:
            self.flush()

    def _top_k(self, inputs: HeadInputs, real: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, N, K) and log-probabilities at the real tokens, 0 elsewhere."""
        top, head = self.about["top_k"], inputs.head
        if top["vocabulary"] < len(head.weight):
            head = head.subset(torch.arange(top["vocabulary"], device=head.weight.device))
        states = inputs.states[real.to(inputs.states.device)]
        found = TopK.of(states, head, top["k"], temperature=top["temperature"])
        return scatter(found.ids.int().to(real.device), real), scatter(
            found.log_probs.float().to(real.device), real
        )

    def _append(self, name: str, x: Tensor) -> None:
        self.columns.setdefault(name, []).append(x)
        self.size += x.nbytes

    def flush(self) -> None:
        if not self.columns:
            return
        tensors = {name: torch.cat(rows).contiguous() for name, rows in self.columns.items()}
        data = _safetensors().torch.save(tensors, {"description": self.about["digest"]})
        path = self.folder / f"shard-{_digest(data)}.safetensors"
        write_file(path, data, shared=True)
        self.columns, self.size = {}, 0


def _tensors_of(head: Head) -> dict[str, Tensor]:
    tensors = {"weight": head.weight, "bias": head.bias}
    for i, factors in enumerate(head.low_rank):
        tensors |= {f"down_{i}": factors.down, f"up_{i}": factors.up}
    return {n: x.detach().cpu().contiguous() for n, x in tensors.items() if x is not None}


def _choices(batch: Batch) -> bool:
    """Whether samples are the choices (B, C, N) of questions, each with one logit."""
    return bool(batch.inputs["input_ids"].dim() == 3)


def scatter(rows: Tensor, mask: Tensor) -> Tensor:
    """Scatter rows of real tokens (T, ...) to their positions in (B, N, ...); padding is zero."""
    mask = mask.to(rows.device)
    return rows.new_zeros(*mask.shape, *rows.shape[1:]).index_put((mask,), rows)


def _facts(teacher: Backbone) -> dict[str, Any]:
    unknown = () if teacher.sizes else ("num_layers", "hidden_size")
    facts = {name: None if name in unknown else getattr(teacher, name) for name in FACTS}
    heads = {"head_padding": teacher.head_padding, "head_end": teacher.head_end}
    facts |= {name: token for name, token in heads.items() if token is not None}
    kept = (REGRESSION, MULTI_LABEL)  # classification is set by transformers at the first labels
    return {**facts, "problem": facts["problem"] if facts["problem"] in kept else None}


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT).read_text())
    except ValueError:
        about = None
    if isinstance(about, dict) and about.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{folder} has cache format {about['format']}, but this fastkd reads {FORMAT}; write "
            "the cache again"
        )
    if not isinstance(about, dict) or about.get("digest") != _about_digest(about):
        raise ValueError(
            f"{folder / ABOUT} was changed; delete the folder, and write the cache again"
        )
    return about


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise with the differing entries unless a run may add to the cache."""
    for section in (
        "format", "model", "kept", "precision", "configuration", "head", "top_k", "spans",
        "fingerprint",
    ):  # fmt: skip
        if old[section] != new[section]:
            raise ValueError(
                f"{folder} was written with other settings "
                f"({_difference(section, old[section], new[section])}); choose another folder, or "
                "delete this one"
            )


def _difference(what: str, old: Any, new: Any) -> str:
    """Text that names the differing entries with their old and new values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        what = f"{what}: {', '.join(names)}"
        old, new = ([values.get(name) for name in names] for values in (old, new))
    return f"{what}: {old}, now {new}"


def _precision(model: nn.Module) -> str:
    """Autocast precision in which the teacher runs."""
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    if not torch.is_autocast_enabled(device):
        return "that of the weights"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _configuration(model: nn.Module) -> dict[str, Any]:
    """Settings by name, besides the weights, that change a teacher's outputs.

    For a transformers model: the configuration, the attention implementation and the adapters'
    configurations. For other models: a digest of the modules' types and plain attributes.
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
    read_back: dict[str, Any] = json.loads(
        json.dumps(found, default=lambda x: sorted(map(str, x)) if isinstance(x, set) else str(x))
    )
    return read_back


def _flat(entries: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries that change outputs; nested dicts have dotted names."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if name in NOT_COMPUTED:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _modules_digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module).__qualname__}".encode())
        for attribute, value in sorted(vars(module).items()):
            if attribute != "training" and not attribute.startswith("_"):
                digest.update(f"{attribute} {_plain(value)}".encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Value of a number, text or list, name of a function, None for other objects."""
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


def _check_unchanged(path: Path, digest: str) -> None:
    """Raise unless a file has the given digest."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; write the cache again, which adds the missing files"
        )
    state = path.stat()
    if _file_digest(path, state.st_mtime_ns, state.st_size) != digest:
        raise ValueError(
            f"{path} was changed; delete it, and write the cache again, which adds missing files"
        )


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, changed: int, size: int) -> str:
    """Digest of a file, cached by its time of change and size."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _weights_digest(model: nn.Module) -> str:
    if any(hasattr(p, "ds_shape") for p in model.parameters()):
        raise ValueError(
            "teacher: DeepSpeed's ZeRO-3 has partitioned its weights, so a cache can't check them; "
            "write the cache from a model that isn't partitioned"
        )
    digest = hashlib.blake2b(digest_size=16)
    for name, entry in sorted(model.state_dict().items()):
        for value in tree_leaves(entry):  # quantised layers have tuples
            if not isinstance(value, Tensor):
                digest.update(f"{name} {value}".encode())
                continue
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value = value.dequantize() if value.is_quantized else value
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def _safetensors() -> Any:
    require("safetensors.torch", "train")
    return require("safetensors", "train")
