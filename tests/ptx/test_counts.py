"""Counted costs of kernels with known costs."""

import pytest
import torch

from tests.ptx.text import kernel
from tools.ptx import launch

COPY = """
    mov.u32 %r79, %tid.x;
    mov.u32 %r78, %ctaid.x;
    shl.b32 %r78, %r78, 6;
    add.u32 %r79, %r79, %r78;
    mul.wide.u32 %d1, %r79, STRIDE;
    ld.param.u64 %d2, [p0];
    add.s64 %d2, %d2, %d1;
    ld.global.f32 %r1, [%d2];
    ld.param.u64 %d3, [p1];
    add.s64 %d3, %d3, %d1;
    st.global.f32 [%d3], %r1;"""


@pytest.mark.parametrize(("stride", "sectors"), [(4, 16), (8, 32), (32, 128), (128, 128)])
def test_sectors_and_distinct_bytes(stride, sectors):
    """Two CTAs of two warps: neighbours share 32 bytes, strided ones do not."""
    x = torch.randn(128 * stride // 4 + 8)
    start = -x.data_ptr() % 32 // 4
    x, out = x[start:], torch.zeros(128 * stride // 4 + 8)
    out = out[-out.data_ptr() % 32 // 4 :]
    text = kernel(COPY.replace("STRIDE", str(stride)), 2)
    counts = launch(text, grid=(2,), threads=64, args=[x, out])
    assert (counts.global_sectors_read, counts.global_sectors_written) == (sectors, sectors)
    assert (counts.global_bytes_read, counts.global_bytes_written) == (512, 512)
    assert counts.instructions == 4 * 12  # with ret
    assert counts.by_class["global"] == 8 and sum(counts.by_class.values()) == 48
    assert counts.divergent == counts.barriers == counts.shared_conflicts == 0


@pytest.mark.parametrize(
    ("words", "vector", "conflicts"),
    [(1, 1, 0), (2, 1, 1), (32, 1, 31), (33, 1, 0), (0, 1, 0), (4, 4, 0), (8, 4, 4), (2, 2, 0)],
)
def test_conflicts_of_shared_memory(words, vector, conflicts):
    """A warp that stores each ``words`` words; wide stores take a half or a quarter at a time."""
    values = ", ".join(["%r79"] * vector)
    body = f"""
    mov.u32 %r79, %laneid;
    mul.lo.u32 %r2, %r79, {4 * words};
    mov.u32 %r3, memory;
    add.u32 %r2, %r2, %r3;
    mov.u32 %r4, 7;
    {f"st.shared.v{vector}.b32" if vector > 1 else "st.shared.b32"} [%r2], {{{values}}};"""
    if words == 0:
        body = body.replace("{%r79}", "{%r4}")
    counts = launch(kernel(body, 0), grid=(1,), threads=32, shared=8192)
    assert counts.shared_conflicts == conflicts


def test_divergent_branches_are_counted():
    body = """
    mov.u32 %r79, %tid.x;
    setp.lt.u32 %p1, %r79, LIMIT;
    @%p1 bra END;
    mov.u32 %r1, 1;
    END:"""
    for limit, divergent in ((16, 1), (32, 0), (48, 1), (64, 0)):
        text = kernel(body.replace("LIMIT", str(limit)), 0)
        assert launch(text, grid=(3,), threads=64).divergent == 3 * divergent
