"""Memory bank of earlier rows, for losses that compare samples."""

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.numerics import values_readable
from fastkd.distributed import Group, InGroup, ranks_of


def _holds(dtype: torch.dtype, labels: Tensor) -> bool:
    """Whether ``dtype`` represents ``labels`` exactly; readable integers are checked by value."""
    if labels.is_floating_point() or not values_readable(labels):
        return torch.promote_types(dtype, labels.dtype) == dtype
    kept = labels.to(dtype)
    # Converted back, since a comparison would round the labels too; 2^63 may become 2^63 − 1.
    same = kept.to(labels.dtype) == labels
    return bool((same & (kept < 2.0**63) if dtype.is_floating_point else same).all())


class FeatureQueue(InGroup):
    """Memory bank: the last ``size`` rows of features, with their labels.

    A loss that compares samples compares only those of its micro-batch. With the bank it also
    compares earlier rows, as neighbours (`knn_feature_loss`) or negatives (`cos_nce_loss`). The
    bank is part of the state_dict and is not trained. ``.half()`` and ``.to(dtype)`` don't convert
    the labels, which rounding would change.

    Each process has a bank of its own rows; losses with ``gather=True`` compare all banks as one.
    DistributedDataParallel around such a bank needs ``broadcast_buffers=False``: otherwise every
    forward pass overwrites all banks with rank 0's. With ``gather`` here every process stores the
    rows of all processes, in the order of their ranks, for losses without ``gather``.

    Args:
        size: rows of the bank.
        dim: features of a row, an int or a shape.
        dtype: of the features; use the student's.
        label_dtype: of the labels, wide enough for them and ``ignore_index``; floating for
            real-valued labels. Labels that it would round raise an error if values can be read.
        ignore_index: label of unfilled rows; pass the same to the loss.
        gather, group: store the rows of all processes, or of a group.

    ``enqueue(features, labels=None, mask=None)``, or a call, overwrites the oldest rows with rows
    (B, ...), detached. ``labels`` (B,) are 0 by default; ``mask`` (B,) is 1 for rows to store. It
    writes in place: call it after the backward pass of a loss on the bank.

    Attributes:
        features: (size, ...); zeros in unfilled rows.
        labels: (size,); ``ignore_index`` in unfilled rows.
        mask: (size,) bool, True for filled rows.

    >>> from fastkd import cos_nce_loss, knn_feature_loss
    >>> queue = FeatureQueue(size=4, dim=2)
    >>> queue.enqueue(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    >>> queue.mask
    tensor([ True,  True, False, False])
    >>> student, labels = torch.tensor([[1.0, 1.0]]), torch.tensor([1])
    >>> knn_feature_loss(student, queue.features, labels, queue.labels)
    tensor(0.5000)
    >>> bank = {"negatives": queue.features, "negatives_mask": queue.mask}
    >>> cos_nce_loss(student, torch.tensor([[0.0, 1.0]]), **bank).shape
    torch.Size([])
    """

    # One row more than the bank: rows that are not stored are written there, as zeros.
    _features: Tensor
    _labels: Tensor
    _mask: Tensor
    _next: Tensor  # index of the next row to overwrite

    def __init__(
        self,
        size: int,
        dim: int | tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        label_dtype: torch.dtype = torch.int64,
        ignore_index: int = -100,
        gather: bool = False,
        group: Group = None,
    ) -> None:
        super().__init__()
        check.positive_int("size", size)
        check.integer("ignore_index", ignore_index)
        shape = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        for n in shape:
            check.positive_int("dim", n)
        for name, kind in (("dtype", dtype), ("label_dtype", label_dtype)):
            if not isinstance(kind, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {type(kind).__name__}")
        self.size, self.ignore_index = size, ignore_index
        self.gather, self.group = gather, group
        if torch.tensor(ignore_index, device="cpu").to(label_dtype).item() != ignore_index:
            raise ValueError(f"label_dtype {label_dtype} can't hold ignore_index={ignore_index}")
        self.register_buffer("_features", torch.empty(size + 1, *shape, dtype=dtype))
        self.register_buffer("_labels", torch.empty(size + 1, dtype=label_dtype))
        self.register_buffer("_mask", torch.empty(size + 1, dtype=torch.bool))
        self.register_buffer("_next", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Empty the bank; call it after ``to_empty``."""
        self._features.zero_()
        self._labels.fill_(self.ignore_index)
        self._mask.zero_()
        self._next.zero_()

    def _apply(self, fn, recurse=True):
        def convert(x: Tensor) -> Tensor:
            converted = fn(x)
            rounded = x is labels and converted.dtype != x.dtype
            return x.to(converted.device) if rounded else converted

        labels = self._labels
        return super()._apply(convert, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        labels = state_dict.get(f"{prefix}_labels")
        if labels is not None and not _holds(self._labels.dtype, labels):
            errors = arguments[-1]
            errors.append(
                f"{prefix}_labels are {labels.dtype}, which the bank's {self._labels.dtype} would "
                f"round; make it with label_dtype={labels.dtype}"
            )

    @property
    def features(self) -> Tensor:
        return self._features[: self.size]

    @property
    def labels(self) -> Tensor:
        return self._labels[: self.size]

    @property
    def mask(self) -> Tensor:
        return self._mask[: self.size]

    @torch.no_grad()
    def enqueue(self, features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None):
        check.floating("features", features)
        rows = features.shape[0]
        check.shape("features", features, (rows, *self._features.shape[1:]), "rows of the bank")
        if labels is None:
            labels = self._labels.new_zeros(rows)
        check.labels("labels", labels, rows, features.device)
        fit = _holds(self._labels.dtype, labels)
        if labels.is_floating_point() and not fit:
            raise TypeError(
                f"labels are {labels.dtype} but the bank's are {self._labels.dtype}; "
                f"make it with label_dtype={labels.dtype}"
            )
        if values_readable(labels) and not fit:
            raise ValueError(f"labels must fit into the bank's {self._labels.dtype}")
        kept = check.mask(mask, (rows,), features.device, of="features", warn_if_empty=False)
        if kept is None:
            kept = torch.ones(rows, dtype=torch.bool, device=features.device)

        if (ranks := ranks_of(self.gather, self.group)) is not None:
            features, labels, kept = ranks.gather_together(features, labels, kept)
        order = kept.cumsum(0)  # 1 for the first row that is kept
        total = kept.sum()
        kept = kept & (order > total - self.size)  # of more rows than the bank has, the last
        slots = torch.where(kept, (self._next + order - 1) % self.size, self.size)
        spread = kept.view(-1, *[1] * (features.dim() - 1))
        features = torch.where(spread, features, 0).to(self._features.dtype)
        labels = torch.where(kept, labels.to(self._labels.dtype), self.ignore_index)
        self._features.index_copy_(0, slots, features)
        self._labels.index_copy_(0, slots, labels.to(self._labels.dtype))
        self._mask.index_copy_(0, slots, kept)
        self._next.copy_((self._next + total) % self.size)

    forward = enqueue

    def extra_repr(self) -> str:
        return f"size={self.size}, ignore_index={self.ignore_index}"
