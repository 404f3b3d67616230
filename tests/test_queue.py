"""The memory bank: ring order against a list, masks, checkpoints, compile, with the losses."""

import pytest
import torch

from fastkd import FeatureQueue, knn_feature_loss
from tests.support.compare import counted, raises


def expected(size, dim, batches):
    """The bank after ``batches`` of (features, labels, mask), by Python lists."""
    features, labels = torch.zeros(size, dim), torch.full((size,), -100)
    mask, place = torch.zeros(size, dtype=torch.bool), 0
    for rows, row_labels, kept in batches:
        for i in range(len(rows)):
            if kept is None or kept[i]:
                features[place], labels[place], mask[place] = rows[i], row_labels[i], True
                place = (place + 1) % size
    return features, labels, mask


def random_batches(sizes, masked=False):
    for n in sizes:
        rows, labels = torch.randn(n, 3), torch.randint(0, 5, (n,))
        kept = torch.rand(n) < 0.6 if masked else None
        yield rows if kept is None else rows.where(kept[:, None], torch.nan), labels, kept


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (3, 0, 3, 3, 3), (7,), (8, 1), (20, 5, 16), (1,) * 9])
def test_ring_order(sizes, masked):
    queue, batches = FeatureQueue(7, 3), list(random_batches(sizes, masked))
    assert not list(queue.parameters())
    for rows, labels, kept in batches:
        queue.enqueue(rows.requires_grad_(), labels, kept)
        state, queue = queue.state_dict(), FeatureQueue(7, 3)  # goes on from a checkpoint
        queue.load_state_dict(state)
    found = queue.features, queue.labels, queue.mask
    assert all(map(torch.equal, found, expected(7, 3, batches)))
    assert not queue.features.requires_grad


def test_compiles_for_all_sizes():
    queue = FeatureQueue(6, 3)

    def step(student, teacher, labels):
        loss = knn_feature_loss(student, queue.features, labels, queue.labels, reduction="none")
        queue.enqueue(teacher, labels)
        return loss

    compiled, graphs = counted(step, "aot_eager")
    batches = list(random_batches((4, 5, 8, 17)))
    for i, (rows, labels, _) in enumerate(batches):
        features, bank_labels, _ = expected(6, 3, batches[:i])
        losses = knn_feature_loss(rows, features, labels, bank_labels, reduction="none")
        assert torch.equal(compiled(rows, rows, labels), losses)
    assert len(graphs) <= 2


def test_shapes_and_dtypes():
    """Labels keep their dtype: rounded to bfloat16, 257 would be 256."""
    queue = FeatureQueue(3, (2, 4), dtype=torch.bfloat16, label_dtype=torch.float32)
    with torch.inference_mode():
        teacher = torch.ones(2, 2, 4)
    queue.enqueue(teacher, torch.tensor([0.5, 257.0]))
    assert (queue.features.shape, queue.features.dtype) == ((3, 2, 4), torch.bfloat16)
    assert queue.bfloat16().labels.tolist() == [0.5, 257, -100]
    queue.enqueue(teacher[:1])
    assert queue.labels.tolist() == [0.5, 257, 0] and queue.labels.dtype == torch.float32
    assert queue.to("meta").labels.device.type == "meta"
    queue.to_empty(device="cpu").reset_parameters()
    assert queue.labels.tolist() == [-100] * 3 and not queue.mask.any()
    assert not queue.features.any() and queue.features.dtype == torch.bfloat16


def test_labels_that_the_bank_would_round_or_merge():
    """They are refused, when enqueued and when loaded; a bank keeps those that it can hold."""
    for kind, label in (
        (torch.bfloat16, 257),
        (torch.float16, 2049),
        (torch.float16, 70_000),
        (torch.float32, 2**24 + 1),
        (torch.float64, 2**53 + 1),
        (torch.float64, 2**63 - 1),
        (torch.int32, 2**31),
        (torch.int8, 300),
    ):
        queue, other = FeatureQueue(3, 1, label_dtype=kind), FeatureQueue(3, 1)
        other.enqueue(torch.zeros(2, 1), torch.tensor([-100, 5]))
        queue.load_state_dict(other.state_dict())
        given = torch.zeros(1, 1), torch.tensor([label])
        raises(f"labels must fit into the bank's {kind}", queue.enqueue, *given)
        assert queue.labels.tolist() == [-100, 5, -100]
        other.enqueue(*given)
        words, state = r"_labels are torch\.int64, which the bank's", other.state_dict()
        raises(words, queue.load_state_dict, state, error=RuntimeError)
    queue = FeatureQueue(2, 1, label_dtype=torch.bfloat16)
    queue.enqueue(torch.zeros(2, 1), torch.tensor([256, 2**62]))
    assert queue.labels.tolist() == [256, 2**62]
    queue = FeatureQueue(3, 1, label_dtype=torch.float32)
    queue.enqueue(torch.zeros(1, 1), torch.tensor([torch.nan]))
    wide = torch.tensor([0.1], dtype=torch.float64)
    raises(r"label_dtype=torch\.float64", queue.enqueue, torch.zeros(1, 1), wide, error=TypeError)


def test_bad_input():
    rows, labels = torch.zeros(2, 3), torch.zeros(3)
    for words, given in (
        (r"features must have shape \(2, 3\)", (torch.zeros(2, 4),)),
        ("features must be bfloat16", (rows.long(),)),
        (r"labels must have shape \(2,\)", (rows, labels)),
        ("label_dtype", (rows, labels[:2])),
        (r"mask must have shape \(2,\)", (rows, None, torch.ones(3))),
    ):
        raises(words, FeatureQueue(5, 3).enqueue, *given, error=(ValueError, TypeError))
    raises("size must be at least 1", FeatureQueue, 0, 3)
    for kind, index in ((torch.bool, -100), (torch.uint8, -100), (torch.float16, -2049)):
        words = f"label_dtype {kind} can't hold ignore_index={index}"
        raises(words, FeatureQueue, 3, 2, label_dtype=kind, ignore_index=index)
    FeatureQueue(3, 2, label_dtype=torch.bool, ignore_index=0)
