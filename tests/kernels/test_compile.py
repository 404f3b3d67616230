"""What public calls launch is declared, and what is declared compiles for every architecture."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from bench.compile_report import choices, covering, modules, variants
from fastkd.contrastive import CosNCELoss, cos_nce_loss
from fastkd.kernels.cayley import cayley_inverse
from fastkd.kernels.pointers import LAYERS_PER_LAUNCH
from fastkd.kernels.variants import forms
from fastkd.knn import knn_feature_loss
from fastkd.projection import MAX_TRITON_COLUMNS, layer_norm_mse
from fastkd.relation import FCDLoss
from fastkd.soft_targets import DIVERGENCES, linear_soft_target_loss, soft_target_loss
from tests.kernels.launches import form, record_forms


@pytest.mark.parametrize("module", modules())
def test_compiles_without_spills(module):
    """In a process of its own: under TRITON_INTERPRET there is nothing to compile."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "bench.compile_report", module, "--json", "--all", "80,90,100"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert rows, f"compile_variants() of {module} yields nothing"
    wrong = [
        f"{row['arch']} {row['kernel']} {row['variant']}: {'; '.join(row['problems'])}"
        for row in rows
        if row["problems"]
    ]
    assert not wrong, "\n".join(wrong)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYERS = (1, 2, LAYERS_PER_LAUNCH, LAYERS_PER_LAUNCH + 1)
MASKED = (False, True)


def mask_of(*shape, masked):
    return torch.ones(shape, dtype=torch.bool) if masked else None


def cayley():
    for n in (1, 256, 257, 2047, 2048):
        yield cayley_inverse(torch.zeros(1, n, n), torch.zeros(1, n, n))


def contrastive():
    labels = (torch.long, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64)
    labels = [None, *(torch.zeros(3, dtype=dtype) for dtype in labels)]
    negatives = [torch.ones(4, 2, 16), torch.ones(3, 4, 2, 16)]
    for dtype, masked, D in itertools.product(DTYPES, MASKED, (8, 16)):
        options = [{"labels": given} for given in labels]
        options += [{"negatives": given[..., :D].to(dtype)} for given in negatives]
        mask = mask_of(3, 2, masked=masked)
        x, y = torch.ones(2, 3, 2, D, dtype=dtype)
        x.requires_grad_()
        for option, reduction in itertools.product(options, ("mean", "sum", "none")):
            yield cos_nce_loss(x, y, mask=mask, reduction=reduction, backend="triton", **option)
        for layers, option in itertools.product(LAYERS, options):
            if "negatives" in option:
                option = {"negatives": [option["negatives"]] * layers}
            loss = CosNCELoss(D, D, backend="triton").to(dtype)
            yield loss([x] * layers, [y] * layers, mask, **option)


def knn():
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    kinds += (*DTYPES, torch.float64)
    # Rows, rows of the bank, features: few and many, sorted by label or not, from products.
    sizes = [(N, M, D) for N in (1, 65) for M in (32, 1024) for D in (8, 16)]
    sizes += [(N, 32, D) for N in (1, 65) for D in (4096, 4097)]
    for dtype, (N, M, D) in itertools.product(DTYPES, sizes):
        student, teacher = torch.ones(N, D, dtype=dtype), torch.ones(M, D, dtype=dtype)
        student.requires_grad_()
        for kind, tolerance, k in itertools.product(kinds, (None, 1, 2.0**40), (1, 8, 32)):
            labels = torch.zeros(N, dtype=kind), torch.zeros(M, dtype=kind)
            options = {"tolerance": tolerance, "k": k, "backend": "triton"}
            yield knn_feature_loss(student, teacher, *labels, **options)


def projection():
    columns = [1, 15, 16, 17]
    columns += [size for log in range(5, 15) for size in (2**log - 1, 2**log)]
    assert columns[-1] == MAX_TRITON_COLUMNS
    for dtype, D in itertools.product(DTYPES, columns):
        x, y = torch.ones(2, 2, D, dtype=dtype)
        for learning in ([x], [y], [x, y]):
            given = (z.clone().requires_grad_(any(z is it for it in learning)) for z in (x, y))
            yield layer_norm_mse(*given, backend="triton")


def relation():
    sizes = (2, 16, 17, 32, 33, 64, 65, 128, 129)
    for dtype, masked, layers in itertools.product(DTYPES, MASKED, LAYERS):
        loss = FCDLoss(backend="triton")
        for B, N in zip(sizes, sizes[::-1], strict=True):
            for learns in (False, True):
                # The kernels see the features of any size and layout as multiples of 16.
                x = torch.ones(B, N, 8 if N % 2 else 16, dtype=dtype)
                students = [x.clone().requires_grad_(learns) for _ in range(layers)]
                for precision in ("highest", "high"):
                    torch.set_float32_matmul_precision(precision)
                    try:
                        yield loss(students, [x] * layers, mask_of(B, N, masked=masked))
                    finally:
                        torch.set_float32_matmul_precision("highest")


def soft_targets():
    numbers = [7, 2.5, *(torch.tensor(1, dtype=dtype) for dtype in (torch.int8, torch.int64))]
    numbers += [torch.tensor(1.0, dtype=dtype) for dtype in (*DTYPES, torch.float64)]
    options = [{"reduction": reduction} for reduction in ("batchmean", "sum", "none")]
    options += [{"denominator": number} for number in numbers]
    for dtype, divergence, V, masked, option in itertools.product(
        DTYPES, DIVERGENCES, (1, 1024, 1025, 1040), MASKED, options
    ):
        option = option | {"divergence": divergence, "mask": mask_of(3, masked=masked)}
        x, y = torch.ones(2, 3, V, dtype=dtype)
        yield soft_target_loss(x.requires_grad_(), y, backend="triton", **option)
        if "denominator" not in option:
            hidden, weight = torch.ones(3, 2, dtype=dtype), torch.ones(V, 2, dtype=dtype)
            yield linear_soft_target_loss(
                hidden.clone().requires_grad_(), weight, hidden, weight, backend="triton", **option
            )


CALLS = (cayley, contrastive, knn, projection, relation, soft_targets)
CALLS = {call.__name__: call for call in CALLS}


@pytest.mark.parametrize("module", CALLS)
def test_registry_is_what_calls_launch(module, device):
    """Nothing runs: losses and gradients are whatever the memory held."""
    with device, record_forms() as launched:
        for loss in CALLS[module]():
            if loss.requires_grad:
                loss.sum().backward()
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 10
    here = 100 if blackwell else 90
    declared = {
        form(
            variant.kernel,
            variant.signature,
            variant.constexprs,
            aligned=bool(variant.aligned),
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )
        for variant in variants(module)
        if here in (variant.capabilities or (here,))
        # More elements than a test should have: sizes of 64 bits.
        and "i64" not in variant.signature.values()
    }
    assert launched == declared, describe(launched, declared)


def describe(launched, declared):
    lines = []
    for title, some in (("not declared", launched - declared), ("idle", declared - launched)):
        lines += [f"{title}: {name} {dict(options)}" for name, options in sorted(some, key=str)]
    return "\n".join(lines)


def test_covering_meets_every_pair_of_choices():
    def kernel(x_ptr, N, A, B, C): ...

    kernel.arg_names, kernel.do_not_specialize = ["x_ptr", "N", "A", "B", "C"], None
    flags = itertools.product(("*fp16", "*fp32"), range(2), range(2), range(2))
    declared = {}
    for dtype, a, b, c in flags:
        for variant in forms(kernel, {"x_ptr": dtype}, {"A": a, "B": b, "C": c}):
            declared[len(declared)] = variant
    assert len(declared) == 32  # with and without aligned sizes
    chosen = covering(declared)
    assert len(chosen) <= 8

    def pairs(indices):
        of_each = (choices(declared[i]).items() for i in indices)
        return {pair for items in of_each for pair in itertools.combinations(sorted(items), 2)}

    assert pairs(chosen) == pairs(declared)
