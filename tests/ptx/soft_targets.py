"""Soft-target losses by the compiled kernels, of sm_80 and sm_90 in turn.

``python -m tests.ptx.soft_targets`` prints each divergence, and the tails of a teacher's top k,
with the errors of value and gradient, relative to the float64 reference.
"""

import torch

import fastkd
from fastkd import Divergence
from fastkd.soft_targets import soft_target_loss_ref
from tests.support.compare import relative_error, value_and_grad
from tools.ptx import executing

OTHERS = (
    Divergence("total_variation"),
    Divergence("negative_log_acceptance"),
    Divergence("lk"),
    Divergence("mixed", mix=0.3),
    Divergence("skew_kl"),
    Divergence("skew_reverse_kl"),
    Divergence("js", beta=0.2),
)


def main() -> None:
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(2, 2, 140)
    student[:, 5] = teacher[:, 5] = -torch.inf
    weights = torch.tensor([0.5, 2.0])
    of_logits = [(divergence.name, teacher, divergence) for divergence in OTHERS]
    log_probs, ids = teacher.log_softmax(-1).topk(5)
    of_top_k = [
        (tail, fastkd.TopK(ids, log_probs, tail), "forward_kl")
        for tail in ("bucket", "renormalise")
    ]
    for i, (name, given, divergence) in enumerate(of_logits + of_top_k):
        options = {"divergence": divergence, "weights": weights}
        exact = given.double() if given is teacher else given
        right = value_and_grad(soft_target_loss_ref, student.double(), exact, **options)
        for capability in (80, 90) if i >= len(OTHERS) else ((80, 90)[i % 2],):
            with executing(capability):
                found = value_and_grad(
                    fastkd.soft_target_loss, student, given, backend="triton", **options
                )
            print(name, *(relative_error(x, y) for x, y in zip(found, right, strict=True)))


if __name__ == "__main__":
    main()
