"""Kernels after Triton's tutorials 02, 03, 05 and 06 against PyTorch."""

import pytest
import torch

from tests.support.interpreter import of_compiled_code

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = of_compiled_code


@triton.jit
def softmax_kernel(
    out_ptr, in_ptr, in_stride, out_stride, n_rows, n_cols,
    BLOCK: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(first, n_rows, step, num_stages=num_stages):
        columns = tl.arange(0, BLOCK)
        mask = columns < n_cols
        x = tl.load(in_ptr + row * in_stride + columns, mask=mask, other=-float("inf"))
        x = tl.exp(x - tl.max(x, axis=0))
        x = x / tl.sum(x, axis=0)
        tl.store(out_ptr + row * out_stride + columns, x, mask=mask)


@pytest.mark.parametrize("columns", [7, 781])
def test_softmax(columns):
    x = torch.randn(9, columns)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    softmax_kernel[(4,)](out, x, columns, columns, 9, columns, BLOCK=block, num_stages=3)
    torch.testing.assert_close(out, x.softmax(-1))


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * num_n
    first_m = pid // in_group * GROUP_M
    size_m = min(num_m - first_m, GROUP_M)
    pid_m, pid_n = first_m + pid % in_group % size_m, pid % in_group // size_m
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    accumulator = tl.where(accumulator >= 0, accumulator, 0.01 * accumulator)
    c = accumulator.to(c_ptr.dtype.element_ty)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * offs_m[:, None] + stride_cn * offs_n[None, :]
    tl.store(c_ptrs, c, mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(dtype, transposed):
    M, N, K = 150, 96, 128
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    if transposed:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    c = torch.empty(M, N, dtype=dtype)
    grid = (triton.cdiv(M, 64) * triton.cdiv(N, 32),)
    matmul_kernel[grid](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=3,
    )  # fmt: skip
    right = torch.nn.functional.leaky_relu(a.double() @ b.double())
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-3}[dtype]
    torch.testing.assert_close(c.double(), right, rtol=tolerance, atol=20 * tolerance)


@triton.jit
def layer_norm_forward(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        columns = off + tl.arange(0, BLOCK)
        mean += tl.load(X + columns, mask=columns < N, other=0.0).to(tl.float32)
    mean = tl.sum(mean, axis=0) / N
    var = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        columns = off + tl.arange(0, BLOCK)
        x = tl.load(X + columns, mask=columns < N, other=0.0).to(tl.float32)
        x = tl.where(columns < N, x - mean, 0.0)
        var += x * x
    rstd = 1 / tl.sqrt(tl.sum(var, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK):
        columns = off + tl.arange(0, BLOCK)
        mask = columns < N
        w, b = tl.load(W + columns, mask=mask), tl.load(B + columns, mask=mask)
        x = tl.load(X + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + columns, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def layer_norm_backward(
    DX, DY, DW, DB, X, W, Mean, Rstd, Lock, stride, N, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    X += row * stride
    DY += row * stride
    DX += row * stride
    lock = row % GROUP
    Lock += lock
    Count = Lock + GROUP
    DW = DW + lock * N + columns
    DB = DB + lock * N + columns
    x = tl.load(X + columns, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + columns, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + columns, mask=mask).to(tl.float32)
    mean, rstd = tl.load(Mean + row), tl.load(Rstd + row)
    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1, c2 = tl.sum(xhat * wdy, axis=0) / N, tl.sum(wdy, axis=0) / N
    tl.store(DX + columns, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
    partial_dw, partial_db = (dy * xhat).to(w.dtype), dy.to(w.dtype)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    if count == 0:
        tl.atomic_xchg(Count, 1)
    else:
        partial_dw += tl.load(DW, mask=mask)
        partial_db += tl.load(DB, mask=mask)
    tl.store(DW, partial_dw, mask=mask)
    tl.store(DB, partial_db, mask=mask)
    tl.debug_barrier()  # all threads' stores before the lock is open
    tl.atomic_xchg(Lock, 0)


@triton.jit
def layer_norm_sums(DW, DB, FINAL_DW, FINAL_DB, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, M, BLOCK_M):
        rows = i + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        offs = rows[:, None] * N + columns[None, :]
        dw += tl.load(DW + offs, mask=mask, other=0.0)
        db += tl.load(DB + offs, mask=mask, other=0.0)
    tl.store(FINAL_DW + columns, tl.sum(dw, axis=0), mask=columns < N)
    tl.store(FINAL_DB + columns, tl.sum(db, axis=0), mask=columns < N)


def test_layer_norm():
    """Its backward pass adds rows of many CTAs up behind locks."""
    M, N, group = 11, 200, 4
    x, w, b, dy = torch.randn(M, N), torch.rand(N), torch.rand(N), torch.randn(M, N)
    y, mean, rstd = torch.empty_like(x), torch.empty(M), torch.empty(M)
    layer_norm_forward[(M,)](x, y, w, b, mean, rstd, N, N, 1e-5, BLOCK=128, num_warps=2)
    wide = [v.double().requires_grad_() for v in (x, w, b)]
    right = torch.nn.functional.layer_norm(wide[0], (N,), wide[1], wide[2])
    torch.testing.assert_close(y.double(), right.detach(), rtol=1e-5, atol=1e-5)
    locks = torch.zeros(2 * group, dtype=torch.int32)
    part_w, part_b = torch.empty(group, N), torch.empty(group, N)
    dx = torch.empty_like(x)
    layer_norm_backward[(M,)](
        dx, dy, part_w, part_b, x, w, mean, rstd, locks, N, N, GROUP=group, BLOCK=256, num_warps=4
    )
    dw, db = torch.empty(N), torch.empty(N)
    layer_norm_sums[(2,)](part_w, part_b, dw, db, group, N, BLOCK_M=4, BLOCK_N=128)
    expected = torch.autograd.grad(right, wide, dy.double())
    for found, want in zip((dx, dw, db), expected, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@triton.jit
def attention_forward(
    Q, K, V, M, Out, scale, N, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    start, head = tl.program_id(0), tl.program_id(1)
    base = head * N * HEAD
    offs_m, offs_n = start * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD)
    q = tl.load(Q + base + offs_m[:, None] * HEAD + offs_d[None, :])
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    qk_scale = scale * 1.44269504
    last = (start + 1) * BLOCK_M if CAUSAL else N
    for start_n in range(0, last, BLOCK_N):
        k = tl.load(K + base + (start_n + offs_n)[None, :] * HEAD + offs_d[:, None])
        qk = tl.dot(q, k) * qk_scale
        if CAUSAL:
            qk += tl.where(offs_m[:, None] >= start_n + offs_n[None, :], 0, -1.0e6)
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(V + base + (start_n + offs_n)[:, None] * HEAD + offs_d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_ij
    m_i += tl.math.log2(l_i)
    tl.store(M + head * N + offs_m, m_i)
    out = (acc / l_i[:, None]).to(Out.type.element_ty)
    tl.store(Out + base + offs_m[:, None] * HEAD + offs_d[None, :], out)


@triton.jit
def attention_delta(Out, DO, Delta, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD)
    o = tl.load(Out + rows[:, None] * HEAD + columns[None, :]).to(tl.float32)
    do = tl.load(DO + rows[:, None] * HEAD + columns[None, :]).to(tl.float32)
    tl.store(Delta + rows, tl.sum(o * do, axis=1))


@triton.jit
def attention_backward(
    Q, K, V, DO, DQ, DK, DV, M, Delta, scale, N,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    start, head = tl.program_id(0), tl.program_id(1)
    base = head * N * HEAD
    offs_d, inner = tl.arange(0, HEAD), tl.arange(0, BLOCK)
    mine = start * BLOCK + tl.arange(0, BLOCK)
    own = base + mine[:, None] * HEAD + offs_d[None, :]
    k, v = tl.load(K + own), tl.load(V + own)
    dk = tl.zeros([BLOCK, HEAD], dtype=tl.float32)
    dv = tl.zeros([BLOCK, HEAD], dtype=tl.float32)
    for first in range(start * BLOCK if CAUSAL else 0, N, BLOCK):
        rows = first + inner
        at = base + rows[:, None] * HEAD + offs_d[None, :]
        q, do = tl.load(Q + at), tl.load(DO + at)
        m, delta = tl.load(M + head * N + rows), tl.load(Delta + head * N + rows)
        pT = tl.math.exp2(tl.dot(k, tl.trans(q)) * (scale * 1.44269504) - m[None, :])
        if CAUSAL:
            pT = tl.where(rows[None, :] >= mine[:, None], pT, 0.0)
        dv += tl.dot(pT.to(do.dtype), do)
        dsT = pT * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk += tl.dot(dsT.to(q.dtype), q)
    tl.store(DV + own, dv.to(v.dtype))
    tl.store(DK + own, (dk * scale).to(k.dtype))
    q, do = tl.load(Q + own), tl.load(DO + own)
    m, delta = tl.load(M + head * N + mine), tl.load(Delta + head * N + mine)
    dq = tl.zeros([BLOCK, HEAD], dtype=tl.float32)
    for first in range(0, (start + 1) * BLOCK if CAUSAL else N, BLOCK):
        rows = first + inner
        at = base + rows[:, None] * HEAD + offs_d[None, :]
        k, v = tl.load(K + at), tl.load(V + at)
        p = tl.math.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.44269504) - m[:, None])
        if CAUSAL:
            p = tl.where(mine[:, None] >= rows[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(DQ + own, (dq * scale).to(q.dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    heads, N, D, scale = 2, 128, 64, 0.3
    q, k, v, do = (torch.randn(heads, N, D).half() for _ in range(4))
    out, m = torch.empty_like(q), torch.empty(heads, N)
    attention_forward[(N // 64, heads)](
        q, k, v, m, out, scale, N, HEAD=D, BLOCK_M=64, BLOCK_N=32, CAUSAL=causal, num_stages=2
    )
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, scale=scale)
    torch.testing.assert_close(out.double(), right.detach(), rtol=1e-2, atol=1e-2)
    delta, grads = torch.empty(heads, N), [torch.empty_like(q) for _ in range(3)]
    attention_delta[(heads * N // 64,)](out, do, delta, HEAD=D, BLOCK=64)
    attention_backward[(N // 32, heads)](
        q, k, v, do, *grads, m, delta, scale, N, HEAD=D, BLOCK=32, CAUSAL=causal, num_stages=2
    )
    for found, want in zip(grads, torch.autograd.grad(right, wide, do.double()), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=3e-2)
