"""Each instruction against values of the PTX manual, of numpy, or of exact arithmetic."""

import fractions
import math

import numpy as np
import pytest
import torch

from tests.ptx.text import elementwise, kernel
from tools.ptx import UnknownInstruction, launch

INF, NAN = math.inf, math.nan


def of(values, dtype):
    """Values repeated to fill a warp."""
    repeated = (list(values) * 32)[:32]
    if dtype == torch.int32:
        repeated = [x - (1 << 32) if x >= 1 << 31 else x for x in repeated]
    if dtype == torch.int64:
        repeated = [x - (1 << 64) if x >= 1 << 63 else x for x in repeated]
    return torch.tensor(repeated, dtype=dtype)


def results(instruction, *columns, dtypes, result):
    inputs = [of(c, d) for c, d in zip(columns, dtypes, strict=True)]
    return elementwise(instruction, *inputs, result=result)[: len(columns[0])].tolist()


BITS, LONG, SINGLE, DOUBLE = torch.int32, torch.int64, torch.float32, torch.float64
SHORT = torch.int16

INTEGERS = [
    ("add.s32", [(2**31 - 1, 1), (-5, 3)], [-(2**31), -2]),
    ("sub.s32", [(-(2**31), 1), (7, 9)], [2**31 - 1, -2]),
    ("mul.lo.s32", [(65536, 65536), (-3, 7)], [0, -21]),
    ("mul.hi.s32", [(65536, 65536), (-3, 7), (-(2**31), -(2**31))], [1, -1, 1 << 30]),
    ("mul.hi.u32", [(0xFFFFFFFF, 0xFFFFFFFF), (1 << 31, 2)], [-2, 1]),
    ("div.s32", [(-7, 2), (7, -2), (-7, -2), (6, 3)], [-3, -3, 3, 2]),
    ("div.u32", [(0xFFFFFFFF, 2), (7, 2)], [0x7FFFFFFF, 3]),
    ("rem.s32", [(-7, 2), (7, -2), (-7, -2)], [-1, 1, -1]),
    ("min.s32", [(-1, 1), (3, 2)], [-1, 2]),
    ("min.u32", [(0xFFFFFFFF, 1)], [1]),
    ("max.s32", [(-1, 1)], [1]),
    ("and.b32", [(0b1100, 0b1010)], [0b1000]),
    ("or.b32", [(0b1100, 0b1010)], [0b1110]),
    ("xor.b32", [(0b1100, 0b1010)], [0b0110]),
    ("shl.b32", [(1, 31), (1, 32), (3, 1), (1, 0xFFFFFFFF)], [-(2**31), 0, 6, 0]),
    ("shr.u32", [(-1, 31), (-1, 32), (8, 2)], [1, 0, 2]),
    ("shr.s32", [(-8, 1), (-8, 40), (8, 40)], [-4, -1, 0]),
]


@pytest.mark.parametrize("signed", [True, False])
def test_products_of_64_bits(signed):
    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0, -987654321987654321]
    pairs = [(a, b) for a in values for b in values][:32]
    kind, size = ("s", 0) if signed else ("u", 1 << 64)
    found = results(
        f"mul.hi.{kind}64 {{out}}, {{0}}, {{1}};", *zip(*pairs, strict=True),
        dtypes=(LONG, LONG), result=LONG,
    )  # fmt: skip
    for (a, b), high in zip(pairs, found, strict=True):
        exact = (a % size if size else a) * (b % size if size else b) >> 64
        assert high % (1 << 64) == exact % (1 << 64), (a, b)


def test_wide_products():
    pairs = [(-3, 5), (2**31 - 1, 2**31 - 1), (-(2**31), 2)]
    instruction = "mul.wide.s32 {out}, {0}, {1};"
    columns = zip(*pairs, strict=True)
    assert results(instruction, *columns, dtypes=(BITS, BITS), result=LONG) == [
        a * b for a, b in pairs
    ]
    instruction = "mad.wide.u32 {out}, {0}, {1}, {2};"
    found = results(
        instruction, [0xFFFFFFFF], [0xFFFFFFFF], [7], dtypes=(BITS, BITS, LONG), result=LONG
    )
    assert found[0] % (1 << 64) == 0xFFFFFFFF**2 + 7


FIELDS = [
    ("bfe.u32", [(0xABCD1234, 8, 8), (0xFFFFFFFF, 0, 32), (0xFF, 40, 4), (5, 0, 0)],
     [0x12, -1, 0, 0]),
    ("bfe.s32", [(0xABCD1234, 28, 4), (0x70, 4, 3), (0x80000000, 31, 8), (0x80000000, 40, 2)],
     [-6, -1, -1, -1]),
    ("prmt.b32", [(0x33221100, 0x77665544, 0x5410), (0x33221100, 0x77665544, 0x7632),
                  (0x80FF00, 0, 0x888A)],
     [0x55441100, 0x77663322, 0x000000FF]),
]  # fmt: skip


ONE = [
    ("brev.b32", [1, 0x80000000, 6], [-(2**31), 1, 0x60000000]),
    ("popc.b32", [0, -1, 0b1011], [0, 32, 3]),
    ("bfind.u32", [0, 1, -1, 0x00010000], [-1, 0, 31, 16]),
    ("bfind.shiftamt.u32", [0, 1, 0x00010000], [-1, 31, 15]),
    ("not.b32", [0, -1], [-1, 0]),
    ("neg.s32", [5, -(2**31)], [-5, -(2**31)]),
    ("abs.s32", [-5, 5], [5, 5]),
]


@pytest.mark.parametrize(("name", "rows", "expected"), [*INTEGERS, *FIELDS, *ONE])
def test_integers(name, rows, expected):
    columns = [*zip(*(row if isinstance(row, tuple) else (row,) for row in rows), strict=True)]
    operands = ", ".join(f"{{{i}}}" for i in range(len(columns)))
    instruction = f"{name} {{out}}, {operands};"
    dtypes = (BITS,) * len(columns)
    assert results(instruction, *columns, dtypes=dtypes, result=BITS) == expected


# Floats


def exact_fma(dtype, a, b, c):
    """Rounded once, by fractions."""
    exact = fractions.Fraction(a) * fractions.Fraction(b) + fractions.Fraction(c)
    nearest = dtype(float(exact))
    options = [np.nextafter(nearest, dtype(-INF)), nearest, np.nextafter(nearest, dtype(INF))]
    gap = [abs(fractions.Fraction(float(x)) - exact) for x in options]
    best = [x for x, g in zip(options, gap, strict=True) if g == min(gap)]
    even = [x for x in best if int(x.view(f"u{x.nbytes}")) % 2 == 0]
    return (even or best)[0]


@pytest.mark.parametrize("bits", [32, 64])
def test_a_fused_product_is_rounded_once(bits):
    dtype = np.float32 if bits == 32 else np.float64
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(256) * 2.0 ** rng.integers(-30, 30, 256) for _ in range(3))
    # Sums that lie halfway but for a last digit, and ones that nearly cancel.
    a[:8], b[:8] = 1 + 2.0**-12, 1 + 2.0**-12
    c[:8] = [2.0**-30, 2.0**-60, -(2.0**-48), 2.0**20, -1, -1 - 2.0**-11, 2.0**30, 2.0**52]
    c[8:128] = -(a * b)[8:128]
    a, b, c = (x.astype(dtype) for x in (a, b, c))
    inputs = [torch.from_numpy(x) for x in (a, b, c)]
    found = elementwise(f"fma.rn.f{bits} {{out}}, {{0}}, {{1}}, {{2}};", *inputs,
                        result=inputs[0].dtype).numpy()  # fmt: skip
    right = [exact_fma(dtype, *map(float, values)) for values in zip(a, b, c, strict=True)]
    assert (found == np.array(right)).all()


def test_fused_products_at_the_ends_of_the_range():
    triples = [
        (2.0**-75, 2.0**-75, 2.0**-149), (2.0**127, 2.0, -INF), (INF, 0.0, 1.0),
        (2.0**-100, 2.0**-49, -(2.0**-149)), (2.0**100, 2.0**27, 2.0**127), (3.0, 0.0, -0.0),
    ]  # fmt: skip
    found = results("fma.rn.f32 {out}, {0}, {1}, {2};", *zip(*triples, strict=True),
                    dtypes=(SINGLE,) * 3, result=SINGLE)  # fmt: skip
    assert found[0] == 2.0**-148 and found[1] == -INF and math.isnan(found[2])
    assert found[3:5] == [0.0, INF] and found[5] == 0.0
    found = results("fma.rn.ftz.f32 {out}, {0}, {1}, {2};", [2.0**-80], [2.0**-60], [-0.0],
                    dtypes=(SINGLE,) * 3, result=SINGLE)  # fmt: skip
    assert found == [0.0]
    doubles = [(2.0**600, 2.0**600, -INF), (2.0**-600, 2.0**-600, 2.0**-1074), (1e300, 1e10, 1.0)]
    found = results("fma.rn.f64 {out}, {0}, {1}, {2};", *zip(*doubles, strict=True),
                    dtypes=(DOUBLE,) * 3, result=DOUBLE)  # fmt: skip
    assert found == [-INF, 2.0**-1074, INF]


def same(found, expected):
    """Equal numbers, NaN and signs of zeros."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )


PAIRS = [(1.0, NAN), (NAN, 2.0), (NAN, NAN), (-0.0, 0.0), (0.0, -0.0), (1.0, -3.0), (-INF, INF)]
FLOATS = [
    ("min.f32", [1.0, 2.0, NAN, -0.0, -0.0, -3.0, -INF]),
    ("max.f32", [1.0, 2.0, NAN, 0.0, 0.0, 1.0, INF]),
    ("min.NaN.f32", [NAN, NAN, NAN, -0.0, -0.0, -3.0, -INF]),
    ("max.NaN.f32", [NAN, NAN, NAN, 0.0, 0.0, 1.0, INF]),
    ("copysign.f32", [math.copysign(b, a) for a, b in PAIRS]),  # of the first, to the second
]


@pytest.mark.parametrize(("name", "expected"), FLOATS)
def test_pairs_of_floats(name, expected):
    found = results(f"{name} {{out}}, {{0}}, {{1}};", *zip(*PAIRS, strict=True),
                    dtypes=(SINGLE, SINGLE), result=SINGLE)  # fmt: skip
    same(found, expected)


ANY_NAN = [0x7FC00000, 0xFFC00000, 0x7FA12345, 0xFFFFFFFF]


@pytest.mark.parametrize(
    "instruction",
    [
        "add.f32 {out}, {0}, {1};", "add.ftz.f32 {out}, {0}, {1};", "sub.f32 {out}, {0}, {1};",
        "mul.f32 {out}, {0}, {1};", "fma.rn.f32 {out}, {0}, {1}, {1};", "min.f32 {out}, {0}, {1};",
        "max.NaN.f32 {out}, {0}, {1};", "div.full.f32 {out}, {0}, {1};",
        "ex2.approx.f32 {out}, {0};", "sqrt.rn.f32 {out}, {0};", "cvt.rni.f32.f32 {out}, {0};",
    ],
)  # fmt: skip
def test_results_have_the_canonical_nan(instruction):
    """Threads that add NaN in another order store the same bits."""
    found = results(instruction, ANY_NAN, ANY_NAN[::-1], dtypes=(BITS, BITS), result=BITS)
    assert found == [0x7FFFFFFF] * len(ANY_NAN)


def test_halves_have_the_canonical_nan():
    for instruction in ("cvt.rn.f16.f32 {out}, {0};", "cvt.rn.bf16.f32 {out}, {0};"):
        found = results(instruction, ANY_NAN, dtypes=(BITS,), result=SHORT)
        assert found == [0x7FFF] * len(ANY_NAN)


def test_infinities_that_cancel_are_the_canonical_nan():
    found = elementwise("sub.f32 {out}, {0}, {0};", of([INF, -INF], SINGLE), result=BITS)
    assert found[:2].tolist() == [0x7FFFFFFF] * 2


def test_flushed():
    pairs = [2.0**-140, 1.0, -(2.0**-126)], [0.0, 2.0**-140, 2.0**-127]
    instruction = "add.ftz.f32 {out}, {0}, {1};"
    found = results(instruction, *pairs, dtypes=(SINGLE, SINGLE), result=SINGLE)
    assert found == [0.0, 1.0, -(2.0**-126)]


SPECIAL = [
    ("ex2.approx.f32", [0.0, -1.0, -INF, 128.0, -140.0], [1.0, 0.5, 0.0, INF, 2.0**-140]),
    ("ex2.approx.ftz.f32", [-140.0, 3.0], [0.0, 8.0]),
    ("lg2.approx.f32", [1.0, 0.0, -1.0, 8.0, INF], [0.0, -INF, NAN, 3.0, INF]),
    ("sqrt.approx.f32", [4.0, -1.0, -0.0], [2.0, NAN, -0.0]),
    ("sqrt.rn.f32", [2.0, 9.0], [float(np.sqrt(np.float32(2))), 3.0]),
    ("rsqrt.approx.f32", [4.0, 0.0, -0.0, INF], [0.5, INF, -INF, 0.0]),
    ("rcp.approx.f32", [4.0, -0.0, INF], [0.25, -INF, 0.0]),
    ("rcp.rn.f32", [3.0], [float(np.float32(1) / np.float32(3))]),
    ("neg.f32", [0.0, 1.0], [-0.0, -1.0]),
    ("abs.f32", [-0.0, -INF], [0.0, INF]),
]


@pytest.mark.parametrize(("name", "values", "expected"), SPECIAL)
def test_functions(name, values, expected):
    same(results(f"{name} {{out}}, {{0}};", values, dtypes=(SINGLE,), result=SINGLE), expected)


@pytest.mark.parametrize(
    ("name", "true"),
    [("eq", {"same"}), ("ne", {"less", "more"}), ("lt", {"less"}), ("le", {"less", "same"}),
     ("gt", {"more"}), ("ge", {"more", "same"}), ("num", {"less", "same", "more"}),
     ("equ", {"same", "nan"}), ("neu", {"less", "more", "nan"}), ("ltu", {"less", "nan"}),
     ("leu", {"less", "same", "nan"}), ("gtu", {"more", "nan"}), ("geu", {"more", "same", "nan"}),
     ("nan", {"nan"})],
)  # fmt: skip
def test_comparisons_of_floats(name, true):
    cases = {"less": (1.0, 2.0), "same": (2.0, 2.0), "more": (3.0, 2.0), "nan": (NAN, 2.0)}
    found = results(
        f"setp.{name}.f32 %p1, {{0}}, {{1}}; selp.b32 {{out}}, 1, 0, %p1;",
        *zip(*cases.values(), strict=True), dtypes=(SINGLE, SINGLE), result=BITS,
    )  # fmt: skip
    assert {case for case, yes in zip(cases, found, strict=True) if yes} == true


CONVERSIONS = [
    ("cvt.rzi.s32.f32", SINGLE, [1.9, -1.9, NAN, 3e9, -INF], BITS, [1, -1, 0, 2**31 - 1, -(2**31)]),
    ("cvt.rni.s32.f32", SINGLE, [0.5, 1.5, -2.5], BITS, [0, 2, -2]),
    ("cvt.rmi.s32.f32", SINGLE, [1.9, -1.1], BITS, [1, -2]),
    ("cvt.rpi.s32.f32", SINGLE, [1.1, -1.9], BITS, [2, -1]),
    ("cvt.rzi.u32.f32", SINGLE, [-1.0, 5e9], BITS, [0, -1]),
    ("cvt.rzi.s64.f64", DOUBLE, [NAN, 1e30, -7.9], LONG, [-(2**63), 2**63 - 1, -7]),
    ("cvt.rn.f32.s32", BITS, [2**24 + 1, -3], SINGLE, [2.0**24, -3.0]),
    ("cvt.rn.f32.u32", BITS, [-1], SINGLE, [2.0**32]),
    ("cvt.rn.f32.u64", LONG, [-1, 1], SINGLE, [2.0**64, 1.0]),
    ("cvt.rn.f64.s64", LONG, [2**53 + 1], DOUBLE, [2.0**53]),
    ("cvt.rn.f32.f64", DOUBLE, [1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50], SINGLE,
     [1.0, 1 + 2.0**-23]),
    ("cvt.f64.f32", SINGLE, [0.1], DOUBLE, [float(np.float32(0.1))]),
    ("cvt.rni.f32.f32", SINGLE, [2.5, -0.5], SINGLE, [2.0, -0.0]),
    ("cvt.s64.s32", BITS, [-1], LONG, [-1]),
    ("cvt.u64.u32", BITS, [-1], LONG, [2**32 - 1]),
    ("cvt.u32.u64", LONG, [2**32 + 5], BITS, [5]),
    ("cvt.s32.s8", BITS, [255, 127, 0x1FF], BITS, [-1, 127, -1]),
    ("cvt.u32.u16", BITS, [-1], BITS, [65535]),
    ("cvt.rna.tf32.f32", SINGLE, [1 + 2.0**-11, 1 + 2.0**-12, -(1 + 2.0**-11)], SINGLE,
     [1 + 2.0**-10, 1.0, -(1 + 2.0**-10)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "values", "result", "expected"), CONVERSIONS)
def test_conversions(name, dtype, values, result, expected):
    same(results(f"{name} {{out}}, {{0}};", values, dtypes=(dtype,), result=result), expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision(half):
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[half]
    x = torch.cat(
        [torch.randn(120), torch.tensor([0.0, -0.0, 1e-7, 7e4, 1e39, INF, -INF, 65519.9])]
    )
    as_half = elementwise(f"cvt.rn.{name}.f32 {{out}}, {{0}};", x, result=SHORT).view(half)
    assert as_half.equal(x.to(half))
    back = elementwise(f"cvt.f32.{name} {{out}}, {{0}};", as_half.view(SHORT), result=SINGLE)
    assert back.equal(as_half.float())
    wide = elementwise(f"cvt.f64.{name} {{out}}, {{0}};", as_half.view(SHORT), result=DOUBLE)
    assert wide.equal(as_half.double())
    y = torch.randn(128)
    both = elementwise(f"cvt.rn.{name}x2.f32 {{out}}, {{0}}, {{1}};", x, y, result=BITS)
    assert both.view(half).view(-1, 2).equal(torch.stack([y, x], 1).to(half))
    pairs = torch.randn(64, 2).to(half), torch.randn(64, 2).to(half)
    added = elementwise(f"add.rn.{name}x2 {{out}}, {{0}}, {{1}};",
                        *(v.view(BITS)[:, 0].contiguous() for v in pairs), result=BITS)  # fmt: skip
    assert added.view(half).view(-1, 2).equal(pairs[0] + pairs[1])


def test_moves_split_and_join():
    body = """mov.b64 {%r20, %r21}, {0};
        mov.b64 {out}, {%r21, %r20};"""
    assert results(body, [0x1111111122222222], dtypes=(LONG,), result=LONG) == [0x2222222211111111]
    body = """mov.b32 {%h3, %h4}, {0};
        mov.b32 {out}, {%h4, %h3};"""
    assert results(body, [0x11112222], dtypes=(BITS,), result=BITS) == [0x22221111]


# Warps


def of_lanes(body, value=None, threads=32):
    value = torch.arange(threads, dtype=BITS) if value is None else value
    return elementwise(body, value, result=BITS)


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane <= 28 else lane),
        ("idx", 7, 31, lambda lane: 7),
        # Segments of 8 lanes: the mask is 24.
        ("idx", 5, 24 << 8 | 31, lambda lane: lane // 8 * 8 + 5),
        ("down", 3, 24 << 8 | 31, lambda lane: lane + 3 if lane % 8 < 5 else lane),
        ("up", 3, 24 << 8, lambda lane: lane - 3 if lane % 8 >= 3 else lane),
    ],
)
def test_shuffles(mode, by, clamp, source):
    found = of_lanes(f"shfl.sync.{mode}.b32 {{out}}, {{0}}, {by}, {clamp}, -1;", threads=64)
    expected = [warp * 32 + source(lane) for warp in range(2) for lane in range(32)]
    assert found.tolist() == expected


def test_shuffle_tells_whether_it_was_in_range():
    body = "shfl.sync.up.b32 %r20|%p1, {0}, 4, 0, -1; selp.b32 {out}, 1, 0, %p1;"
    assert of_lanes(body).tolist() == [0] * 4 + [1] * 28


def test_votes_and_reductions():
    body = "setp.gt.s32 %p1, {0}, 29; vote.sync.ballot.b32 {out}, %p1, -1;"
    assert of_lanes(body).tolist() == [-(2**30)] * 32
    values = torch.randint(-1000, 1000, (64,), dtype=BITS)
    for name, function in (("add", torch.sum), ("min", torch.amin), ("max", torch.amax)):
        found = of_lanes(f"redux.sync.{name}.s32 {{out}}, {{0}}, -1;", values)
        right = function(values.view(2, 32), dim=1).repeat_interleave(32)
        assert found.tolist() == right.tolist()


def test_a_cache_policy_changes_no_value():
    body = """
    mov.u32 %r79, %tid.x;
    ld.param.u64 %d1, [p0];
    mul.wide.u32 %d2, %r79, 4;
    add.s64 %d3, %d1, %d2;
    createpolicy.fractional.L2::evict_first.b64 %d4, 1.0;
    ld.global.L1::evict_first.L2::cache_hint.b32 %r1, [%d3], %d4;
    ld.param.u64 %d1, [p1];
    add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r1;"""
    values, out = torch.arange(32, dtype=BITS), torch.zeros(32, dtype=BITS)
    launch(kernel(body, 2), grid=(1,), threads=32, shared=0, args=[values, out])
    assert out.equal(values)


# Shared memory, matrices, products


def test_matrices_of_a_warp():
    """ldmatrix loads fragments in the layout of mma; .trans exchanges rows and columns."""
    body = """
    mov.u32 %r79, %tid.x;
    ld.param.u64 %d1, [p0];
    mul.wide.u32 %d2, %r79, 16;
    add.s64 %d3, %d1, %d2;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d3];
    mov.u32 %r5, memory;
    shl.b32 %r6, %r79, 4;
    add.s32 %r6, %r6, %r5;
    st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.TRANS.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];
    ld.param.u64 %d1, [p1];
    add.s64 %d3, %d1, %d2;
    st.global.v4.b32 [%d3], {%r10, %r11, %r12, %r13};"""
    tiles = torch.arange(4 * 64, dtype=SHORT).view(4, 8, 8)
    for trans in (".trans", ""):
        out = torch.zeros(32, 4, 2, dtype=SHORT)
        text = kernel(body.replace(".TRANS", trans), 2)
        counts = launch(text, grid=(1,), threads=32, shared=512, args=[tiles, out])
        seen = tiles.mT if trans else tiles
        # Lane 4i + j has elements 2j and 2j + 1 of row i of each tile.
        right = seen.reshape(4, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4, 2)
        assert out.equal(right)
        assert counts.shared_conflicts == 0 and counts.barriers == 1


def fragments(A, B, C, size):
    """Registers (32, ...) of A, B and C, by the manual's figures."""
    row, column = torch.arange(32) // 4, torch.arange(32) % 4
    per = 4 // size
    K = A.shape[1]
    a, b, c = [], [], []
    for block in range(K // (4 * per)):
        for half in range(2):
            for i in range(per):
                a.append(A[row + 8 * half, block * 4 * per + column * per + i])
        for i in range(per):
            b.append(B[block * 4 * per + column * per + i, row])
    for half in range(2):
        for i in range(2):
            c.append(C[row + 8 * half, 2 * column + i])
    return (torch.stack(x, 1).contiguous() for x in (a, b, c))


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "s8"])
def test_products_of_a_warp(kind):
    K, dtype, size = {"f16": (16, torch.float16, 2), "bf16": (16, torch.bfloat16, 2),
                      "tf32": (8, SINGLE, 4), "s8": (32, torch.int8, 1)}[kind]  # fmt: skip
    A, B, C = torch.randn(16, K), torch.randn(K, 8), torch.randn(16, 8)
    sums = "f32"
    if kind == "s8":
        A, B, C, sums = 50 * A, 50 * B, (100 * C).int(), "s32"
    A, B = (x.clamp(-128, 127).to(dtype) for x in (A, B))
    a, b, c = fragments(A, B, C, size)
    body = f"""
    mov.u32 %r79, %tid.x;
    mul.wide.u32 %d2, %r79, 16;
    mul.wide.u32 %d4, %r79, 8;
    ld.param.u64 %d1, [p0];
    add.s64 %d1, %d1, %d2;
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d1];
    ld.param.u64 %d1, [p1];
    add.s64 %d1, %d1, %d4;
    ld.global.v2.b32 {{%r5, %r6}}, [%d1];
    ld.param.u64 %d1, [p2];
    add.s64 %d1, %d1, %d2;
    ld.global.v4.b32 {{%r7, %r8, %r9, %r10}}, [%d1];
    mma.sync.aligned.m16n8k{K}.row.col.{sums}.{kind}.{kind}.{sums}
        {{%r7, %r8, %r9, %r10}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7, %r8, %r9, %r10}};
    st.global.v4.b32 [%d1], {{%r7, %r8, %r9, %r10}};"""
    counts = launch(kernel(body, 3), grid=(1,), threads=32, args=[a, b, c])
    if kind == "tf32":
        A, B = ((x.view(BITS) & ~0x1FFF).view(SINGLE) for x in (A, B))
    right = A.double() @ B.double() + C.double()
    row, column = torch.arange(32) // 4, torch.arange(32) % 4
    for place in range(4):
        expected = right[row + 8 * (place // 2), 2 * column + place % 2]
        torch.testing.assert_close(c[:, place].double(), expected, rtol=1e-6, atol=1e-6)
    assert counts.mma_flops == 2 * 16 * 8 * K


def test_atomics():
    """Atomics of all threads at one address, and the counts of requested bytes."""
    body = """
    mov.u32 %r79, %tid.x;
    ld.param.u64 %d1, [p0];
    atom.global.gpu.acq_rel.add.u32 %r1, [%d1], 2;
    red.global.gpu.relaxed.max.s32 [%d1+4], %r79;
    atom.global.cas.b32 %r2, [%d1+8], 5, %r79;
    mov.u32 %r5, memory;
    shl.b32 %r6, %r79, 2;
    add.s32 %r6, %r6, %r5;
    mov.b32 %r7, 0;
    st.shared.b32 [%r6], %r7;
    bar.sync 0;
    atom.shared.add.u32 %r8, [memory+4], 1;
    bar.sync 0;
    ld.shared.b32 %r9, [memory+4];
    st.global.b32 [%d1+12], %r9;"""
    out = torch.tensor([0, 0, 5, 0], dtype=BITS)
    counts = launch(kernel(body, 1), grid=(1,), threads=64, shared=256, args=[out])
    assert out.tolist()[:2] == [128, 63] and out[2] < 64 and out[3] == 64
    assert counts.by_class["atomic"] == 8 and counts.barriers == 2


def test_branches_meet_again():
    body = """
    mov.b32 {out}, 0;
    mov.b32 %r20, 0;
    LOOP:
    add.s32 {out}, {out}, %r20;
    add.s32 %r20, %r20, 1;
    setp.lt.s32 %p1, %r20, {0};
    @%p1 bra LOOP;
    setp.eq.s32 %p2, {0}, 3;
    @%p2 bra SMALL;
    add.s32 {out}, {out}, 1000;
    bra END;
    SMALL:
    add.s32 {out}, {out}, 500;
    END:
    shfl.sync.bfly.b32 %r21, {out}, 1, 31, -1;
    """
    lanes = torch.arange(32)
    trips = lanes.clamp(min=1)
    right = trips * (trips - 1) // 2 + torch.where(lanes == 3, 500, 1000)
    assert of_lanes(body).tolist() == right.tolist()


@pytest.mark.parametrize("line", ["tcgen05.wait::ld.sync.aligned;", "cvt.rz.f16.f32 {out}, {0};",
                                  "add.u32 {out}, %undeclared, 1;"])  # fmt: skip
def test_an_unknown_instruction_has_its_line(line):
    with pytest.raises(UnknownInstruction, match=r"line \d+: "):
        of_lanes(line)


def test_arguments_are_checked():
    text = kernel("", 1)
    with pytest.raises(ValueError, match="threads: 33"):
        launch(text, grid=(1,), threads=33)
    with pytest.raises(ValueError, match="2 for 1 parameters"):
        launch(text, grid=(1,), threads=32, args=[None, None])
    with pytest.raises(ValueError, match="2 entries"):
        launch(text + text, grid=(1,), threads=32)
