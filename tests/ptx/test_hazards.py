"""Faults planted in the text of real kernels are found; without them there is none."""

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx.recorded import copied, launch_of, launches
from tests.ptx.text import elementwise, kernel
from tests.support.interpreter import of_compiled_code
from tools.ptx import Hazard, launch

pytestmark = of_compiled_code

FORWARD, SMALL = "soft_target_kernel", "relation_small_groups_kernel"


def start(found, ptx=None):
    fresh = [found["args"][i] for i in found["fresh"]]
    options = {name: found[name] for name in ("grid", "threads", "shared", "args")}
    return launch(ptx or found["ptx"], fresh=fresh, **options)


def hazard_of(found, ptx):
    assert ptx != found["ptx"]
    with pytest.raises(Hazard) as raised:
        start(found, ptx)
    return raised.value


def without(pattern, ptx, count=1, replacement=""):
    """The text without the statements that match, of which there must be some."""
    text, found = re.subn(pattern, replacement, ptx, count=count)
    assert found
    return text


@pytest.mark.thorough
def test_no_hazard_without_a_fault():
    """One launch of each kernel, from its text; all of them ran when they were recorded."""
    for found in {(x["name"], x["capability"]): x for x in launches()}.values():
        start({**found, "args": copied(found["args"])})


def test_a_barrier_is_missing():
    for number in (0, 1, 2, 5):
        found = launch_of(FORWARD)
        parts = re.split(r"(bar\.sync\s+0;)", found["ptx"])
        text = "".join(parts[: 2 * number + 1] + parts[2 * number + 2 :])
        error = hazard_of(found, text)
        assert error.kind == "race" and ".shared" in error.instruction
        assert 0 <= error.thread < 256 and error.cta == 0


# Kernel, capability, statements, how many (0: all), what takes their place, and the hazard.
FAULTS = {
    "wait for a copy": (SMALL, 80, r"cp\.async\.wait_group \s*\d+;", 0, "", "asynchronous"),
    "wait for products": (
        SMALL, 90, r"wgmma\.wait_group\.sync\.aligned 0;", 1, "", "asynchronous",
    ),
    "mask": (FORWARD, 80, r"@%p\d+ (?=ld\.global\.b32)", 0, "", "bounds"),
    "fence of shared memory": (SMALL, 90, r"fence\.proxy\.async\.shared::cta;", 0, "", "fence"),
    "fence of registers": (SMALL, 90, r"wgmma\.fence\.sync\.aligned;", 0, "", "fence"),
    "bound": (FORWARD, 80, r"setp\.lt\.s32", 0, "setp.le.s32", "bounds, grid race, race"),
    "half of a warp": (
        FORWARD, 80, r"(shfl\.sync\.bfly\.b32 [^;]*), -1;", 1, r"\1, 65535;", "convergence",
    ),
    "part of a CTA": (
        FORWARD, 80, r"bar\.sync \s*0;", 1,
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra $L__planted; bar.sync 0; $L__planted:",
        "barrier, race",
    ),
    "other CTAs": ("relation_small_gradient_kernel", 80, r"%ctaid\.x", 0, "%ctaid.z", "grid race"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_statement(fault):
    name, capability, pattern, count, replacement, kinds = FAULTS[fault]
    found = launch_of(name, capability)
    text = without(pattern, found["ptx"], count, replacement)
    assert hazard_of(found, text).kind in kinds.split(", ")


def counting():
    """A kernel whose threads count in a word of shared memory, as a launch."""
    body = """
    mov.u32 %r79, %tid.x;
    shl.b32 %r2, %r79, 2;
    mov.u32 %r3, memory;
    add.u32 %r2, %r2, %r3;
    mov.u32 %r4, 0;
    st.shared.b32 [%r2], %r4;
    bar.sync 0;
    atom.shared.add.u32 %r5, [memory], 1;
    bar.sync 0;
    ld.shared.b32 %r6, [%r2];
    ld.param.u64 %d1, [p0];
    mul.wide.u32 %d2, %r79, 4;
    add.s64 %d1, %d1, %d2;
    st.global.b32 [%d1], %r6;"""
    out = torch.zeros(64, dtype=torch.int32)
    return {"ptx": kernel(body, 1), "grid": (1,), "threads": 64, "shared": 4096, "args": [out],
            "fresh": []}  # fmt: skip


def test_an_initial_store_is_missing():
    found = counting()
    start(found)
    assert found["args"][0].tolist() == [64] + [0] * 63
    assert hazard_of(found, without(r"st\.shared\S*\s[^;]*;", found["ptx"])).kind == "unwritten"


def test_a_result_is_read_before_it_is_written():
    found = launch_of("reduce_kernel")
    found["fresh"] = [0, *found["fresh"]]  # the losses that it adds
    with pytest.raises(Hazard, match="unwritten"):
        start(found)


def test_part_of_a_warp_never_reaches_a_shuffle():
    body = """setp.lt.s32 %p1, {0}, 16;
        @%p1 bra END;
        shfl.sync.bfly.b32 {out}, {0}, 1, 31, -1;
        END:"""
    with pytest.raises(Hazard, match="convergence") as raised:
        elementwise(body, torch.arange(32, dtype=torch.int32), result=torch.int32)
    assert raised.value.thread == 16 and raised.value.cta == 0


def test_part_of_a_cta_misses_a_barrier():
    body = "setp.lt.s32 %p1, {0}, 32; @%p1 bra END; bar.sync 0; END: mov.b32 {out}, 1;"
    with pytest.raises(Hazard, match="barrier"):
        elementwise(body, torch.arange(64, dtype=torch.int32), result=torch.int32)


def test_an_atomic_is_missing():
    found = counting()
    text = without(
        r"atom\.shared\.add\.u32 (%r\d+), (\[[^\]]*\]), 1;", found["ptx"],
        replacement=r"ld.shared.u32 \1, \2; add.u32 \1, \1, 1; st.shared.u32 \2, \1;",
    )  # fmt: skip
    assert hazard_of(found, text).kind == "race"


def test_two_ctas_write_one_word():
    body = """
    mov.u32 %r79, %ctaid.x;
    ld.param.u64 %d1, [p0];
    st.global.u32 [%d1], %r79;"""
    out = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(Hazard, match="grid race") as raised:
        launch(kernel(body, 1), grid=(2,), threads=32, args=[out])
    assert raised.value.cta in (0, 1)
    atomic = body.replace("st.global.u32 [%d1]", "red.global.add.u32 [%d1]")
    launch(kernel(atomic, 1), grid=(2,), threads=32, args=[out])
    assert out[0] == 32 or out[0] == 33


def test_vectors_are_aligned():
    body = """
    ld.param.u64 %d1, [p0];
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1+4];"""
    with pytest.raises(Hazard, match="alignment"):
        launch(kernel(body, 1), grid=(1,), threads=32, args=[torch.zeros(16)])


def test_a_lock_orders_ctas():
    """Writes before a release are visible to the thread that acquires."""
    body = """
    mov.u32 %r79, %tid.x;
    setp.ne.s32 %p1, %r79, 0;
    @%p1 bra END;
    ld.param.u64 %d1, [p0];
    TRY:
    atom.global.acq_rel.gpu.cas.b32 %r1, [%d1], 0, 1;
    setp.ne.s32 %p2, %r1, 0;
    @%p2 bra TRY;
    ld.global.u32 %r2, [%d1+4];
    mov.u32 %r3, %ctaid.x;
    add.s32 %r2, %r2, 1;
    st.global.u32 [%d1+4], %r2;
    atom.global.acq_rel.gpu.exch.b32 %r1, [%d1], 0;
    END:"""
    out = torch.zeros(2, dtype=torch.int32)
    launch(kernel(body, 1), grid=(5,), threads=32, args=[out])
    assert out.tolist() == [0, 5]
    unordered = body.replace("acq_rel", "relaxed")
    with pytest.raises(Hazard, match="grid race"):
        launch(kernel(unordered, 1), grid=(5,), threads=32, args=[out.zero_()])
