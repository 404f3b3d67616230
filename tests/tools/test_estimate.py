"""Predictions from compiled code: the arithmetic by hand, the parsers on a few lines, one case."""

import json

import pytest
import torch

from tools.compile_report import not_interpreted
from tools.machine_code import Assumed, Loop, Site, executed, machine_code, work
from tools.prediction import (
    GPUS,
    Kernel,
    issue_seconds,
    memory_seconds,
    product_seconds,
    resident,
)

H200 = GPUS["h200"]

DISASSEMBLY = """\
	//## File "/somewhere/kernels/one.py", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_0:
	//## File "/somewhere/kernels/one.py", line 4
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
	//## File "/somewhere/kernels/one.py", line 6
        /*0030*/                   FADD R5, R5, R4 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
	//## File "/somewhere/kernels/one.py", line 4
        /*0050*/               @P0 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   EXIT ;
"""

# sum over blocks of 128 columns, twice where a value in memory says so; then a matrix product.
TTIR = """\
#loc = loc("/somewhere/kernels/one.py":1:0)
#loc1 = loc("/somewhere/kernels/one.py":4:9)
#loc2 = loc("/somewhere/kernels/one.py":9:9)
#loc3 = loc("x"(#loc1))
#loc4 = loc(callsite(#loc2 at #loc3))
module {
  tt.func public @one(%x_ptr: !tt.ptr<bf16> loc("x_ptr"(#loc)), %V: i32 loc("V"(#loc))) {
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c128 = arith.constant 128 : i32 loc(#loc)
    %cst = arith.constant dense<0.000000e+00> : tensor<16x16xf32> loc(#loc)
    %row = tt.get_program_id x : i32 loc(#loc)
    %at = arith.muli %row, %V : i32 loc(#loc)
    %from = tt.addptr %x_ptr, %at : !tt.ptr<bf16>, i32 loc(#loc)
    %sum = scf.for %i = %c0 to %V step %c128 iter_args(%s = %cst) -> (tensor<16x16xf32>)  : i32 {
      %p = tt.splat %from : !tt.ptr<bf16> -> tensor<128x!tt.ptr<bf16>> loc(#loc)
      %v = tt.load %p : tensor<128x!tt.ptr<bf16>> loc(#loc)
      scf.yield %s : tensor<16x16xf32> loc(#loc)
    } loc(#loc3)
    %flag = tt.load %from : !tt.ptr<bf16> loc(#loc)
    %again = arith.cmpi ne, %flag, %c0 : i32 loc(#loc)
    scf.if %again {
      %w = tt.load %from : !tt.ptr<bf16> loc(#loc)
    } loc(#loc4)
    %d = tt.dot %a, %b, %cst, inputPrecision = tf32x3 : tensor<16x32xf32> * tensor<32x16xf32> -> tensor<16x16xf32> loc(#loc)
    tt.store %from, %d : !tt.ptr<bf16> loc(#loc)
  } loc(#loc)
}
"""  # noqa: E501


def test_loops_and_lines_of_machine_code():
    code = machine_code(DISASSEMBLY)
    assert len(code.instructions) == 7
    assert code.loops == [Loop(2, 5, "one.py:4"), Loop(3, 4, "one.py:6")]
    # 3 outside, 2 in the outer loop alone, 2 in the inner one.
    assert executed(code, {"one.py:4": [10.0], "one.py:6": [50.0]}) == 3 + 2 * 10 + 2 * 50
    assert executed(code, {"one.py:4": [10.0]}) == 3 + 4 * 10
    # What is called twice, and became one loop.
    assert executed(code, {"one.py:4": [10.0, 5.0]}) == 3 + 4 * 15


@pytest.mark.parametrize("both", [False, True])
def test_work_of_a_program(both):
    done = work(TTIR, [object(), 1000], (64,), Assumed(both=both))
    assert done.trips == {"one.py:4": [8]}
    x = frozenset((0,))
    assert done.loads == [Site(x, 8 * 128 * 2), Site(x, 2), Site(x, 2 * both)]
    assert done.stores == [Site(x, 2)]
    assert done.products == {"tf32x3": 2 * 16 * 16 * 32}
    assert done.waits == 8
    assert done.unknown == {"if one.py:9"}


def test_resident_programs():
    # 8 warps of 48 registers: 1536 a warp, 12288 a program; 65536 / 12288 = 5.3.
    assert resident(H200, 8, 48, 32) == 5
    assert resident(H200, 8, 243, 16384) == 1
    assert resident(H200, 4, 32, 0) == 16  # 64 warps
    assert resident(H200, 4, 32, 100_000) == 2  # 233472 / 101024


def test_memory_and_cache():
    site = Site(frozenset((0,)), 1e6)
    # 100 programs ask for 1 MB each of a tensor of 60 MB, twice: more than half of the cache.
    memory, cache = memory_seconds(H200, [site, site], {0: 60_000_000}, 100)
    assert memory == pytest.approx(2 * 60e6 / (0.9 * 4.8e12))
    assert cache == pytest.approx(200e6 / 5.5e12)
    # A small tensor comes from memory once, however often it is read.
    memory, _ = memory_seconds(H200, [site, site], {0: 1_000_000}, 100)
    assert memory == pytest.approx(1e6 / (0.9 * 4.8e12))


def test_issue_and_products():
    # 264 programs are 2 a processor: 2 · 1000 · 8 / 4 = 4000 cycles.
    assert issue_seconds(H200, 1000, 8, 264, 2) == pytest.approx(4000 / 1.83e9)
    # One warp alone: an instruction in two cycles.
    assert issue_seconds(H200, 1000, 1, 1, 16) == pytest.approx(2000 / 1.83e9)
    # 133 programs take two rounds of 132 processors; tf32x3 is three products of tf32.
    once = 132e6 / (0.8 * 494e12)
    assert product_seconds(H200, {"tf32x3": 1e6}, 133, True) == pytest.approx(3 * 2 * once)
    assert product_seconds(H200, {"tf32x3": 1e6}, 1, False) == pytest.approx(3 * once / 0.62)


def test_a_kernel_takes_its_longest_limit():
    made = Kernel("one", 1, 132, {"memory": 3e-6, "instructions": 5e-6})
    assert (made.bound, made.total) == ("instructions", 5e-6)
    assert Kernel("one", 2, 1, {"memory": 1e-9}).total == 2 * 2e-6


def test_products_and_factors_of_pytorch_are_counted():
    pytest.importorskip("triton")
    from tools.recording import Recorder, _Operations

    recorder = Recorder(90)
    a = torch.eye(6).expand(2, 6, 6).clone()
    with _Operations(recorder):
        a.baddbmm_(a, a)
        torch.linalg.cholesky_ex(a)
        torch.linalg.solve_triangular(a, a[..., :4], upper=False)
    counted = [operations for _, _, operations, _ in recorder.started if operations]
    assert counted == [2 * 2 * 6**3, 2 * 6**3 // 3, 2 * 6**2 * 4]


def test_a_case_without_a_gpu():
    pytest.importorskip("triton")
    options = ["--device", "h100", "--json", "--set", "bert", "--only", "attention"]
    row = json.loads(not_interpreted("tools.estimate", *options).splitlines()[0])
    assert row["key"] == "attention/maps/B32 H12 N128/bfloat16" and row["problem"] is None
    names = [kernel["name"] for kernel in row["kernels"]]
    assert "attention_forward_kernel" in names and "attention_backward_kernel" in names
    # Never less than its floor, and both maps are read: 2 · 32·12·128² entries of two bytes.
    assert row["predicted_ms"] >= row["floor_ms"] > 0
    forward = row["kernels"][names.index("attention_forward_kernel")]
    assert forward["detail"]["bytes"] >= 2 * 32 * 12 * 128**2 * 2
