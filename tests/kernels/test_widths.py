"""No kernel of the benchmarks reads or writes aligned rows less than 16 bytes at a time."""

import json

import pytest

pytest.importorskip("triton")

from tools.compile_report import not_interpreted

# Where a thread's share of a tile is no run of 16 bytes at an address known to be aligned, and why
# it stays so: the line's beginning, by kernel.
ALLOWED = {
    # Rows of the bank in the order of their labels lie anywhere, as do candidates. Products are
    # rows of M numbers, few and in the cache; M is not specialised, for few compiled forms.
    "knn_search_kernel": (
        "return tl.load(order_ptr + position",
        "product += tl.sum(tl.load(product_ptr",
    ),
    "knn_product_kernel": ("tl.store(product_ptr + offsets",),
    # One number a row, added up by one program; the number of rows is not specialised.
    "cos_nce_reduce_kernel": ("total += tl.load(partial_ptr", "counted += tl.load(counted_ptr"),
    "soft_target_reduce_kernel": ("total += tl.load(loss_ptr",),
    # Those few entries that may be the head's end, each where its place is.
    "soft_target_forward_kernel": ("tl.store(members_ptr",),
}


@pytest.mark.slow
def test_accesses_are_wide():
    found = json.loads(not_interpreted("tools.widths"))
    unaligned = found.pop("unaligned")
    assert any("tl.load(row_ptr" in line for line in unaligned), "narrow accesses are not seen"
    assert len(found) > 15
    wrong = [
        f"{kernel}: {line}"
        for kernel, lines in found.items()
        for line in lines
        if not line.startswith(ALLOWED.get(kernel, ("nothing",)))
    ]
    assert not wrong, "\n".join(wrong)
    unused = [
        start
        for kernel, starts in ALLOWED.items()
        for start in starts
        if not any(line.startswith(start) for line in found[kernel])
    ]
    assert not unused, f"these are wide now: {unused}"
