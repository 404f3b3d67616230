"""Second moments of several layers over a stream of observations, for the similarity measures.

`Covariances` and `Factors` store float64 matrices of the layers' sizes, whatever the number of
observations. Both are centred with every update (Chan, Golub, LeVeque), so no digits are lost where
|mean| is much larger than the standard deviation. `Covariances` costs less; `Factors` doesn't
square condition numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastkd.distributed import Group, world_size

EPS = torch.finfo(torch.float64).eps


class Directions(NamedTuple):
    """Singular directions of a layer's centred features, without those of rounding error.

    ``values`` (r,), descending; ``vectors`` (r, D). ``basis`` (m, r) are the left singular vectors,
    in the space of a factor's rows.
    """

    values: Tensor
    vectors: Tensor
    basis: Tensor | None = None

    def leading(self, variance: float) -> int:
        """Number of directions that hold this fraction of the variance."""
        held = self.values.square().cumsum(0)
        if not len(held) or variance == 1:
            return len(held)
        return min(len(held), int((held / held[-1] < variance - 1e-12).sum()) + 1)


class Moments(ABC):
    """Count and means of L layers with W features together; subclasses store second moments.

    With ``fourth`` also sums for the unbiased CKA: Σ p_i p_j (L, L), Σ p_i x (L, W) and Σ p_i (L,)
    over the observations, where p_i = ‖x_i‖² of the centred features of layer i.
    """

    mean: Tensor
    fourths: tuple[Tensor, ...]

    def __init__(self, fourth: bool = False) -> None:
        self.fourth = fourth
        self.count = 0
        self.widths: list[int] = []
        #: Of each layer's features, whose rounding is no direction.
        self.eps: list[float] = []
        self.second: dict[Any, Tensor] = {}
        self._forget()

    def update(self, layers: Sequence[Tensor], dtypes: Sequence[torch.dtype] = ()) -> None:
        """Add the rows of ``layers``, each ``(n, D_l)``: the same n observations in every layer.

        ``dtypes`` are those that the features were computed in, if they have others now.
        """
        rows = torch.cat([x.double() for x in layers], 1)  # (n, W)
        if not len(rows):
            return
        if not self.widths:
            self.widths = [x.shape[1] for x in layers]
            self.mean = rows.new_zeros(rows.shape[1])
            sizes = ((len(layers),), (rows.shape[1],), ())
            self.fourths = tuple(rows.new_zeros(len(layers), *size) for size in sizes)
            self.eps = [torch.finfo(t).eps for t in dtypes or [x.dtype for x in layers]]
            self._begin(rows)
        weight = len(rows) / (self.count + len(rows))
        self._move_to(self.mean + (rows.mean(0) - self.mean) * weight)
        rows -= self.mean
        if self.fourth:
            p = torch.stack([x.square().sum(1) for x in self.split(rows)])  # (L, n)
            self._add_fourths((p @ p.T, p @ rows, p.sum(1)))
        self._add(rows)
        self.count += len(rows)
        self._forget()

    def merge(self, other: "Moments") -> None:
        """Add the observations of ``other``, which may change."""
        if not other.count:
            return
        if not self.count:
            self.__dict__.update(other.__dict__)
            return
        weight = other.count / (self.count + other.count)
        mean = self.mean + (other.mean - self.mean) * weight
        for moments in (self, other):
            moments._move_to(mean)
        self.eps = list(map(max, self.eps, other.eps))
        self._add_fourths(other.fourths)
        self._join(other.second)
        self.count += other.count
        self._forget()

    def gathered(self, group: Group = None) -> "Moments":
        """Moments of all processes' observations, on the CPU; the same bits in every process."""
        ranks = world_size(group)
        if ranks == 1:
            return self
        self._forget()
        self.second = {key: x.cpu() for key, x in self.second.items()}
        if self.widths:
            self.mean = self.mean.cpu()
            self.fourths = tuple(x.cpu() for x in self.fourths)
        parts: list[Any] = []
        for rank in range(ranks):
            sent = [self if rank == dist.get_rank(group) else None]
            source = rank if group is None else dist.get_global_rank(group, rank)
            dist.broadcast_object_list(sent, src=source, group=group)
            parts.append(sent[0])
            if len(parts) == 2:
                parts[0].merge(parts.pop())
        return parts[0]

    def _forget(self) -> None:
        """Drop cached results, since the moments change."""
        self._known: dict[int, Directions] = {}
        self._energies: dict[tuple[int, int], Tensor] = {}

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x`` (..., W) split by layer."""
        return x.split(self.widths, -1)

    def directions(self, i: int) -> Directions:
        """The singular directions of layer i."""
        if i not in self._known:
            self._known[i] = self._directions(i)
        return self._known[i]

    def noise(self, i: int, squares: Tensor) -> float:
        """Singular values that rounding of layer i's features may have, of all ``squares`` (r,).

        Rounding errors of n·D features with mean square r² are a matrix with singular values up to
        about eps·r·(√n + √D)/√12; a LayerNorm rounds more than once, so the bound is ten times
        that.
        """
        mean = self.split(self.mean)[i].square().sum()
        size = float(squares.sum() + self.count * mean) ** 0.5  # √(nD)·r
        return 3 * self.eps[i] * size * (max(1, self.widths[i]) ** -0.5 + self.count**-0.5)

    def rounding(self, i: int) -> float:
        """Largest singular value that is rounding error of centring layer i."""
        return 4 * EPS * self.count**0.5 * float(self.split(self.mean)[i].norm())

    def energy(self, i: int, j: int) -> Tensor:
        """‖Σ x_i x_jᵀ‖²_F."""
        pair = min(i, j), max(i, j)
        if pair not in self._energies:
            self._energies[pair] = self.cross(*pair).square().sum()
        return self._energies[pair]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Σ p_i p_j (L, L) and Σ p_i (L,); needs ``fourth``."""
        return self.fourths[0], self.fourths[2]

    def _add_fourths(self, more: tuple[Tensor, ...]) -> None:
        for mine, theirs in zip(self.fourths, more, strict=True):
            mine += theirs

    def _by_layer(self, x: Tensor) -> Tensor:
        """``x`` (L, W), summed over each layer's features: (L, L)."""
        return torch.stack([part.sum(-1) for part in self.split(x)], 1)

    def _move_to(self, mean: Tensor) -> None:
        """Shift all moments from the observations' mean to ``mean``."""
        shift, self.mean = mean - self.mean, mean
        if not self.count:
            return
        if self.fourth:
            # x becomes x - a, p becomes p - 2 x·a + a·a, and Σx is 0.
            pairs, thirds, squares = self.fourths
            length = torch.stack([a.square().sum() for a in self.split(shift)])
            moved = self._times(shift)  # (L, W): S_ji a_i
            turned = self._by_layer(thirds * shift)
            pairs += torch.outer(squares, length) + torch.outer(length, squares)
            pairs += 4 * self._by_layer(moved * shift) - 2 * (turned + turned.T)
            pairs += self.count * torch.outer(length, length)
            squares += self.count * length
            thirds -= squares[:, None] * shift + 2 * moved
        self._shift_by(shift)

    @abstractmethod
    def cross(self, i: int, j: int) -> Tensor:
        """Σ x_i x_jᵀ (D_i, D_j) of the centred features of layers i and j."""

    @abstractmethod
    def overlap(self, i: int, j: int, kept: tuple[int, int]) -> Tensor:
        """Cosines between the ``kept`` leading directions of layers i and j, as observations."""

    @abstractmethod
    def _directions(self, i: int) -> Directions: ...

    @abstractmethod
    def _begin(self, rows: Tensor) -> None: ...

    @abstractmethod
    def _add(self, rows: Tensor) -> None: ...

    @abstractmethod
    def _join(self, second: dict[Any, Tensor]) -> None: ...

    @abstractmethod
    def _shift_by(self, shift: Tensor) -> None:
        """Move the mean of the second moments by ``shift``."""

    @abstractmethod
    def _times(self, shift: Tensor) -> Tensor:
        """S_ji a_i for all layers i and j: (L, W)."""


class Covariances(Moments):
    """Σ x_i x_jᵀ of all pairs of layers, or only of those at most ``reach`` apart.

    A correlation has an error of about κ²·1e-16, where κ is the ratio of the largest singular value
    to the smallest that counts; a fraction v of the variance bounds κ² by D / (1 - v).
    """

    def __init__(self, fourth: bool = False, reach: int | None = None) -> None:
        super().__init__(fourth)
        self.reach = reach

    def cross(self, i: int, j: int) -> Tensor:
        return self.second[i, j] if i <= j else self.second[j, i].T

    def overlap(self, i: int, j: int, kept: tuple[int, int]) -> Tensor:
        left, right = (
            directions.vectors[:k].T / directions.values[:k]
            for directions, k in zip(map(self.directions, (i, j)), kept, strict=True)
        )
        return left.T @ self.cross(i, j) @ right

    def _directions(self, i: int) -> Directions:
        squares, vectors = torch.linalg.eigh(self.cross(i, i))
        squares, vectors = squares.flip(0), vectors.flip(1)
        noise = max(self.rounding(i), self.noise(i, squares))
        least = max(float(squares[:1].sum()) * len(squares) * EPS, noise**2)
        rank = int((squares > least).sum())
        return Directions(squares[:rank].sqrt(), vectors[:, :rank].T)

    def _begin(self, rows: Tensor) -> None:
        layers = len(self.widths)
        reach = layers if self.reach is None else self.reach
        for i in range(layers):
            for j in range(i, min(layers, i + reach + 1)):
                self.second[i, j] = rows.new_zeros(self.widths[i], self.widths[j])

    def _add(self, rows: Tensor) -> None:
        parts = self.split(rows)
        for (i, j), total in self.second.items():
            total.addmm_(parts[i].T, parts[j])

    def _join(self, second: dict[Any, Tensor]) -> None:
        for pair, total in self.second.items():
            total += second[pair]

    def _shift_by(self, shift: Tensor) -> None:
        parts = self.split(shift)
        for (i, j), total in self.second.items():
            total.addr_(parts[i], parts[j], alpha=self.count)

    def _times(self, shift: Tensor) -> Tensor:
        parts, layers = self.split(shift), range(len(self.widths))
        return torch.stack(
            [torch.cat([self.cross(j, i) @ parts[i] for j in layers]) for i in layers]
        )


class Factors(Moments):
    """Triangular factor R of a QR decomposition of all layers' centred features, concatenated.

    R is updated by Householder reflections, layer by layer: row panel k, (D_k, Σ_{j≥k} D_j), is
    decomposed together with the remaining new rows. No product of features is formed, so singular
    values and correlations equal those of all rows at once to about κ·1e-16.
    """

    def cross(self, i: int, j: int) -> Tensor:
        height = sum(self.widths[: min(i, j) + 1])
        return self._column(i)[:height].T @ self._column(j)[:height]

    def overlap(self, i: int, j: int, kept: tuple[int, int]) -> Tensor:
        left, right = self.directions(i).basis, self.directions(j).basis
        assert left is not None and right is not None
        height = min(len(left), len(right))
        return left[:height, : kept[0]].T @ right[:height, : kept[1]]

    def _column(self, i: int) -> Tensor:
        """Columns of R for layer i, (Σ_{k≤i} D_k, D_i): its features, rotated."""
        start = [sum(self.widths[k:i]) for k in range(i + 1)]
        width = self.widths[i]
        return torch.cat([self.second[k][:, start[k] : start[k] + width] for k in range(i + 1)])

    def _directions(self, i: int) -> Directions:
        basis, values, vectors = torch.linalg.svd(self._column(i), full_matrices=False)
        size = max(self.count, self.widths[i])
        noise = self.noise(i, values.square())
        least = max(float(values[:1].sum()) * size * EPS, self.rounding(i), noise)
        rank = int((values > least).sum())
        return Directions(values[:rank], vectors[:rank], basis[:, :rank])

    def _begin(self, rows: Tensor) -> None:
        for k, width in enumerate(self.widths):
            self.second[k] = rows.new_zeros(width, sum(self.widths[k:]))

    def _add(self, rows: Tensor, first: int = 0) -> None:
        for k in range(first, len(self.widths)):
            width = self.widths[k]
            both = torch.cat([self.second[k], rows])
            reflections, scales = torch.geqrf(both[:, :width])
            turned = torch.ormqr(reflections, scales, both[:, width:], transpose=True)
            self.second[k] = torch.cat([reflections[:width].triu(), turned[:width]], 1)
            rows = turned[width:]

    def _join(self, second: dict[Any, Tensor]) -> None:
        for k, panel in second.items():
            self._add(panel, k)

    def _shift_by(self, shift: Tensor) -> None:
        self._add(shift[None] * self.count**0.5)

    def _times(self, shift: Tensor) -> Tensor:
        parts, layers = self.split(shift), range(len(self.widths))
        moved = [self._column(i) @ parts[i] for i in layers]
        columns = [self._column(j) for j in layers]
        return torch.stack([torch.cat([_upper(c, x) for c in columns]) for x in moved])


def _upper(column: Tensor, x: Tensor) -> Tensor:
    """columnᵀ x over the rows that both have."""
    height = min(len(column), len(x))
    return column[:height].T @ x[:height]
