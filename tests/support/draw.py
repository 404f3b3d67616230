"""Random calls as users have them: sizes, dtypes, layouts, masks and labels drawn from a seed."""

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.subject import function_of

SIZES = (1, 2, 2, 3, 5, 7, 8, 13, 16, 17, 31)
# Sizes that users have, drawn seldom.
BATCH, LENGTH, WIDTH = (1, 64), (1, 512), (8, 768)
KINDS = (
    "normal", "normal", "parallel", "scaled", "sparse", "few", "constant", "layer_norm", "far",
    "uneven", "near",
)  # fmt: skip
REGULAR = KINDS[:4]  # of full rank: elsewhere a sum of singular values has no derivative
# Of heads and their states: a product of far ones has logits that no model has.
OF_HEADS = tuple(kind for kind in KINDS if kind not in ("far", "layer_norm"))
MASKS = ("none", "none", "random", "random", "right", "right", "right", "left", "left", "nothing")
# Where the random calls of a run begin: elsewhere in each, or where the commit says, as in .ci/run.
# Processes that a run starts take it from the environment: all of them draw the same tests.
FIRST = int(os.environ.get("FASTKD_TEST_SEED") or random.SystemRandom().randrange(2**31))
os.environ["FASTKD_TEST_SEED"] = str(FIRST)
ROUNDINGS = 10  # of the inputs, which any implementation may lose
# Sizes from which on work is divided, and smaller ones for some calls, whose work is small.
DIVIDING: dict[str, Any] = {
    "fastkd._core.fallback._chunks": lambda x, entries: max(len(x) // 3, 1),
    "fastkd._core.products.TILE_ENTRIES": (40, 40),
    "fastkd._core.products.LEAST_BLOCKED": 4,
    "fastkd.lm.linear_soft_targets.TILE_ROWS": 4,
    "fastkd.lm.row_losses.CHUNK_LOGITS": 40,
    "fastkd.losses.cos_nce.BLOCK_ELEMENTS": 40,
    "fastkd.losses.neighbours.BLOCK_ELEMENTS": 40,
    "fastkd.losses.neighbours.MAX_BLOCK_ROWS": 8,
    "fastkd.losses.neighbours.MIN_ROWS_TO_CENTRE": 1,
    "fastkd.losses.neighbours.PAIR_ELEMENTS": 20,
    "fastkd.losses.neighbours.PRODUCT_FEATURES": 4,
    "fastkd.losses.neighbours.ROWS_OF_OWN": 3,
    "fastkd.losses.neighbours.SMALL_PROBLEM": 0,
    "fastkd.kernels.contrastive.ROWS_PER_SUM": 16,
    "fastkd.kernels.knn.BANK_TO_SORT": 1,
    "fastkd.kernels.pointers.LAYERS_PER_LAUNCH": 2,
    "fastkd.kernels.knn.FAR_APART": 1,
    "fastkd.kernels.knn.FEATURES_TO_SPLIT": 8,
    "fastkd.kernels.knn.MOST_BYTES_TO_COPY": 0,
    "fastkd.kernels.knn.PROGRAMS": 2,
    "fastkd.kernels.knn.ROWS_TO_SORT": 1,
}


@dataclass
class Case:
    """One call. Tensors of ``learning`` get gradients; ``given`` tensors and ``options`` not.

    ``oracle`` takes the same names in float64. ``scale`` is the size of the terms that the value
    is a difference of.
    """

    call: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    learning: dict[str, Tensor]
    given: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    module: torch.nn.Module | None = None
    mask: Tensor | None = None  # (B, N): positions whose features become NaN after the oracle
    masked: tuple[str, ...] = ()  # names of the features that the mask applies to, by default all
    autocast: bool = False
    # The size of d(result)/d(row) for a row of features (..., D): 1/‖x‖ where only angles count.
    slope: Callable[[Tensor], Tensor] | None = None
    # The same by name, from all inputs: of parameters, or of all that gets a gradient.
    parameter_slopes: Callable[..., dict[str, float]] | None = None
    # Allowed error in roundings of the inputs.
    roundings: float = ROUNDINGS
    # Half-precision dtype of the kernel's products, if any.
    products: torch.dtype | None = None
    # Rows where rounding decides whether the result is infinite.
    unsure: Tensor | None = None
    # Argument that sets the result's dtype; all others have the working dtype.
    like: str | None = None
    of_rows: bool = False  # NaN in an input reaches the results that it reaches in the oracle


def by_norm(x: Tensor) -> Tensor:
    norm = x.norm(dim=-1)
    return torch.where(norm == 0, 0, 1 / torch.where(norm == 0, 1, norm))


def projected_slopes(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[float, float]:
    """Sizes of a mean cosine's gradients of weight and bias, for rows that they project.

    A short projection has a large gradient, which is 0 in one dimension.
    """
    sizes = by_norm(rows @ weight.mT if bias is None else rows @ weight.mT + bias)
    count = max(len(rows), 1)
    return (rows.norm(dim=-1) * sizes).norm().item() / count, sizes.norm().item() / count


class Draw:
    """Random choices of one seed. The backend "reference" calls the `*_ref` function in float64."""

    def __init__(self, seed: int, backend: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.backend = backend
        types = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
        types = types if backend == "triton" else [*types, torch.float64]
        self.dtype = torch.float64 if backend == "reference" else self.pick(types)
        self.drawn: list[Tensor] = []  # features, in float64
        self.centres: dict[int, Tensor] = {}  # of clusters, by number of features

    @contextlib.contextmanager
    def dividing(self) -> Iterator[None]:
        """Context of the call, in which some work is divided."""
        with contextlib.ExitStack() as changed:
            if self.chance(0.25):
                for place, value in DIVIDING.items():
                    kernels = place.startswith("fastkd.kernels.")
                    if self.chance(0.5) and (self.backend == "triton" or not kernels):
                        changed.enter_context(mock.patch(place, value))
            yield

    def function(self, name: str) -> Callable[..., Tensor]:
        """A public function on the draw's backend."""
        return function_of(name, self.backend)

    def module(self, make: Callable[..., Any], /, *fixed: Any, **options: Any) -> Any:
        """A Module on the draw's backend; in half of all calls its options are set afterwards."""
        if self.chance(0.5):
            return make(*fixed, backend=self.backend, **options)
        module = make(*fixed, backend=self.backend)
        for name, value in options.items():
            setattr(module, name, value)
        return module

    def pick(self, choices: Any) -> Any:
        return self.random.choice(list(choices))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def size(self, zero: bool = False) -> int:
        return 0 if zero and self.chance(0.05) else self.pick(SIZES)

    def sizes(self, *ranges: tuple[int, int], most: int = 2**13, zero: bool = False) -> list[int]:
        """A size of each range: small ones, and in every tenth call those that users have.

        The product of the largest size of each range is at most ``most``, which an oracle's loops
        bear. With ``zero`` some small sizes are 0. Triton's interpreter gets one size above that of
        a kernel's block instead.
        """
        if self.backend == "triton" or not self.chance(0.1):
            found = [self.size(zero) for _ in ranges]
            if self.backend == "triton" and self.chance(0.1):
                place = self.random.randrange(len(ranges))
                found[place] = self.pick(x for x in (33, 65, 129) if x <= max(ranges[place][1], 33))
            return found
        found = [
            round(math.exp(self.random.uniform(math.log(low), math.log(high))))
            for low, high in ranges
        ]
        while True:
            largest: dict[tuple[int, int], int] = {}
            for size, limits in zip(found, ranges, strict=True):
                largest[limits] = max(size, largest.get(limits, 0))
            if math.prod(largest.values()) <= most:
                return found
            longest = max(range(len(found)), key=lambda i: found[i] / ranges[i][0])
            found[longest] = max(found[longest] // 2, ranges[longest][0])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def features(
        self, *shape: int, scales: tuple[float, ...] = (1e-3, 30.0), kinds: tuple[str, ...] = KINDS
    ) -> Tensor:
        """Features (..., D) in the case's dtype, of a random kind and layout."""
        x = self.normal(*shape)
        kind = self.pick(kinds)
        alike = [other for other in self.drawn if other.shape == x.shape]
        if kind == "parallel":  # mean cosines of real language models, up to 0.9999
            x = x * self.pick([0.3, 0.1, 0.01]) + self.normal(shape[-1])
        elif kind == "scaled":
            x = x * self.pick(scales)
        elif kind == "sparse":
            x = torch.where(self.uniform(*shape) < 0.5, x, 0)
        elif kind == "few" and x.numel():
            flat = x.reshape(-1, shape[-1])
            rows = torch.randint(min(3, len(flat)), (len(flat),), generator=self.generator)
            x = flat[rows].reshape(shape)
        elif kind == "constant":
            x = torch.ones(shape, dtype=torch.float64) * 0.5
        elif kind == "layer_norm":  # with gains and a few large features, as in real models
            gains = 1 + 0.1 * self.normal(shape[-1])
            gains[self.uniform(shape[-1]) < 0.05] = 20.0
            x = torch.nn.functional.layer_norm(x, shape[-1:]) * gains
        elif kind == "far":  # a mean that bfloat16 rounds coarsely
            x = x + self.pick([8.0, 100.0])
        elif kind == "uneven":
            chosen = torch.randint(len(scales), (*shape[:-1], 1), generator=self.generator)
            x = x * torch.tensor(scales).double()[chosen]
        elif kind == "clusters":  # near duplicates of distant rows
            centres = self.centres.setdefault(shape[-1], 30 * self.normal(4, shape[-1]))
            chosen = torch.randint(4, shape[:-1], generator=self.generator)
            x = centres[chosen] + self.pick([1e-4, 1e-10]) * x
        elif kind == "near" and alike:  # the same layer of another step
            x = self.pick(alike) + self.pick([0.1, 1e-2]) * x
        self.drawn.append(x)
        return self.laid_out(x.to(self.dtype))

    def laid_out(self, x: Tensor) -> Tensor:
        """``x`` with other strides."""
        if x.dim() == 0:
            return x
        layout = self.pick(["dense", "dense", "sliced", "transposed", "offset"])
        if layout == "sliced":
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
            wide[..., 1::2] = x
            return wide[..., 1::2]
        if layout == "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "offset":
            padded = x.new_full((x.numel() + 1,), float("nan"))
            padded[1:] = x.flatten()
            return padded[1:].view(x.shape)
        return x

    def mask(self, *shape: int) -> Tensor:
        """A mask (..., N); padded ones have rows of unlike lengths, from 0 to N."""
        kind = self.pick(MASKS if shape else ("none", "nothing"))
        if kind == "random":
            return self.uniform(*shape) < 0.7
        if kind in ("right", "left"):
            lengths = torch.randint(0, shape[-1] + 1, (*shape[:-1], 1), generator=self.generator)
            places = torch.arange(shape[-1])
            return places < lengths if kind == "right" else places.flip(0) < lengths
        return torch.full(shape, kind == "none")

    def mask_argument(self, mask: Tensor) -> Tensor | None:
        """A mask as users pass it: None if all is real, bool, or a tokenizer's integers."""
        if bool(mask.all()) and self.chance(0.5):
            return None
        return mask.to(self.pick([torch.bool, torch.int64, torch.float32]))

    def weights(self, real: Tensor) -> tuple[Tensor | None, Tensor]:
        """Factors of losses as users pass them, NaN where not ``real``; in float64, 0 there."""
        if self.chance(0.5):
            return None, real.double()
        x = self.normal(*real.shape).to(self.pick([torch.bfloat16, torch.float32, torch.float64]))
        x = x.where(self.uniform(*real.shape) < 0.8, 0)
        unreal = 1.0 if self.backend == "reference" else float("nan")
        given = self.laid_out(x.masked_fill(~real, unreal))
        return given, x.double().masked_fill(~real, 0)

    def labels(self, size: int) -> Tensor:
        return torch.randint(0, self.pick([1, 2, 3, 7]), (size,), generator=self.generator)


def module_case(
    draw: Draw,
    module: torch.nn.Module,
    oracle: Callable[..., Tensor],
    sizes: tuple[int, int, int, int],
    mask: Tensor,
    scale: float = 1.0,
    **arguments: Tensor,
) -> Case:
    """A Module with parameters in float32 (float64 for float64 features), often under autocast.

    ``sizes`` are B, N, Ds, Dt of the features; ``arguments`` the Module takes besides the mask.
    """
    if draw.dtype == torch.float64:
        module.double()
    B, N, D_s, D_t = sizes
    return Case(
        lambda student, teacher, mask: module(student, teacher, mask=mask, **arguments),
        oracle,
        {"student": draw.features(B, N, D_s)},
        {"teacher": draw.features(B, N, D_t)},
        {"mask": draw.mask_argument(mask)},
        module=module,
        mask=mask,
        autocast=draw.chance(0.5),
        scale=scale,
        slope=None if scale == 0 else by_norm,
    )


def reduced(losses: Tensor, compared: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / (compared.sum().clamp_min(1) if reduction == "mean" else 1)


def poisoned(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with NaN and inf at padding, in its own layout; without strides if it is constant."""
    if (mask is None or mask.all()) and x.numel() and (x == x.flatten()[0]).all():
        return x.detach().flatten()[0].expand(x.shape)
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    if mask is not None:
        out[~mask] = torch.tensor([float("nan"), float("inf")])[out[~mask].numel() % 2].to(x.dtype)
    return out
