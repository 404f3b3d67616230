"""FCD's operations and memory beside MiniLM's (3.2): `python -m bench.fcd_complexity`."""

import argparse

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastkd._core.machine import describe
from fastkd.distill.attention_relations import relation_divergence
from fastkd.losses.relation import relation_loss, relation_loss_ref

from .measure import _best_seconds, peak_bytes
from .report import table


def rows(B: int, N: int, D: int) -> list[tuple[str, ...]]:
    """For each loss the paper's operations and numbers, those counted, and time and memory."""
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    student, teacher = (torch.randn(B, N, D, generator=generator) for _ in range(2))
    student.requires_grad_()
    mask = torch.ones(B, N, dtype=torch.bool)

    def fcd(loss):
        return sum(loss(student, teacher, mask, over=over) for over in ("tokens", "samples"))

    def relations(heads, times):
        split = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (student, teacher))
        pairs = [(x, x) for x in split]  # (B, H, N, d)
        return sum(relation_divergence(pairs, mask).mean() for _ in range(times))

    tokens, samples, found = B * N * N, B * B * N, []
    for name, operations, numbers, loss in (
        ("FCD, fastkd", 2 * (tokens + samples) * D, tokens + samples, lambda: fcd(relation_loss)),
        ("FCD, as printed", 2 * (tokens + samples) * D, tokens + samples,
         lambda: fcd(relation_loss_ref)),
        ("MiniLM", 4 * tokens * D, 2 * tokens, lambda: relations(12, 2)),
        ("MiniLMv2", 18 * tokens * D, 9 * tokens, lambda: relations(48, 3)),
    ):  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            loss()

        def step(loss=loss):
            return torch.autograd.grad(loss(), student)

        counted = counter.get_total_flops()  # a multiplication and an addition are two
        found.append((
            name, f"{operations / 1e9:.4f}", f"{counted / 2e9:.4f}" if counted else "",
            f"{numbers / 1e6:.2f}", f"{peak_bytes(step, device) / 2**20:.0f}",
            f"{1e3 * _best_seconds(step, device):.0f}",
        ))  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table of one layer pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("B", 32), ("N", 128), ("D", 768)):
        parser.add_argument(f"-{name}", type=int, default=size)
    found = describe(torch.device("cpu"))
    machine, torch_version = found["machine"], found["versions"]["torch"]
    print(
        f"{machine['cpu']}, {machine['threads']} threads, torch {torch_version}, {found['commit']}"
    )
    columns = "loss | 10⁹ operations, paper | counted | 10⁶ numbers, paper | peak MiB | ms"
    print(table(columns, rows(**vars(parser.parse_args(arguments))), text=1))


if __name__ == "__main__":
    main()
