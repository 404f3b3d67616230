"""The same tiny distillation by every method, in every loop and over processes: one curve."""

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from fastkd.distill import DistillationTrainer
from fastkd.distill.verify import taken
from tests.distill.models import cut, exact
from tests.distill.processes import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:CCALoss"),
    pytest.mark.filterwarnings("ignore:`isinstance"),  # within lightning
]

STEPS, ROWS, RATE = 4, 8, 0.05


def batches():
    torch.manual_seed(5)
    made = []
    for _ in range(STEPS):
        lengths = torch.randint(4, 12, (ROWS, 1))
        mask = (torch.arange(12) < lengths).long()
        ids = torch.randint(5, 60, (ROWS, 12)) * mask
        labels = torch.arange(ROWS) % 3
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def rows():
    return [{k: x[i] for k, x in batch.items()} for batch in batches() for i in range(ROWS)]


def watched(name, **options):
    distiller = exact(name, **options)
    if hasattr(distiller.method, "first_stage"):
        distiller.method.first_stage = 0.5
    losses = []
    distiller.register_forward_hook(lambda module, args, out: losses.append(out.loss.item()))
    return distiller, losses


def optimizer_of(distiller):
    return torch.optim.SGD([p for p in distiller.parameters() if p.requires_grad], lr=RATE)


def weights_of(distiller):
    return {n: p.detach().clone() for n, p in distiller.named_parameters() if p.requires_grad}


def run(distiller, part=lambda batch: batch, model=None):
    """The plain loop, each step with a part of its batch."""
    optimizer = optimizer_of(distiller)
    for step, batch in enumerate(batches()):
        distiller.set_progress(step / STEPS)
        taken(distiller, part(batch), model)
        optimizer.step()


def plain(name):
    distiller, losses = watched(name)
    run(distiller)
    return losses, weights_of(distiller)


def in_trainer(name, tmp_path):
    distiller, losses = watched(name)

    DistillationTrainer(
        model=distiller,
        args=TrainingArguments(
            str(tmp_path), num_train_epochs=1, per_device_train_batch_size=ROWS, optim="sgd",
            learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True,
            train_sampling_strategy="sequential",
        ),
        train_dataset=rows(),
    ).train()  # fmt: skip
    return losses, weights_of(distiller)


def in_lightning(name, tmp_path):
    L = pytest.importorskip("lightning")
    distiller, losses = watched(name)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.distiller = distiller

        def training_step(self, batch, index):
            self.distiller.set_progress(index / STEPS)
            return self.distiller(**batch).loss

        def configure_optimizers(self):
            return optimizer_of(self)

    L.Trainer(
        max_epochs=1, accelerator="cpu", precision="64-true", logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    ).fit(Module(), DataLoader(rows(), batch_size=ROWS))  # fmt: skip
    return losses, weights_of(distiller)


def in_accelerate(name, tmp_path):
    from accelerate import Accelerator

    distiller, losses = watched(name, gather=True)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(rows(), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(distiller, optimizer_of(distiller), loader)
    for step, batch in enumerate(loader):
        distiller.set_progress(step / STEPS)
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights_of(distiller)


@pytest.fixture(scope="module")
def expected():
    return {name: plain(name) for name in ("fcd", "knn", "lrc_bert", "mc3kd", "lrkd")}


assert_one_curve = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)


# Loops with what a loop can get wrong: progress of a schedule, parameters of the method, samples
# compared across processes; `verify` takes every method's step in parts and resumed
# (tests/distill/test_verify.py), and test_splits.py every method's step over processes.
LOOPS = [("lrc_bert", in_trainer), ("lrkd", in_trainer), ("lrc_bert", in_lightning)]
LOOPS += [("fcd", in_accelerate)]
# Methods that compare samples, have parameters or a schedule; its second stage is another graph.
WAYS = {
    "static_graph": ("knn", "mc3kd"),
    "fsdp2": ("fcd", "lrkd"),
}


@pytest.mark.parametrize(("name", "way"), LOOPS)
def test_loops(name, way, expected, tmp_path):
    assert_one_curve(way(name, tmp_path), expected[name])


def by_processes(rank, ends, ways):
    curves = {}
    for way in ways:
        for name in WAYS[way]:
            distiller, losses = watched(name, gather=True)
            if way == "fsdp2":
                sharded(distiller, len(ends) - 1)
                model = distiller
            else:
                model = DistributedDataParallel(distiller, **{way: True})
            run(distiller, lambda batch: cut(batch, *ends)[rank], model)
            weights = weights_of(distiller)
            if way == "fsdp2":
                weights = {n: w.full_tensor() for n, w in weights.items()}
            curves[way, name] = losses, weights
    return curves


def sharded(distiller, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in distiller.student.bert.encoder.layer:
        fully_shard(block, mesh=mesh)
    fully_shard(distiller.student, mesh=mesh)
    if list(distiller.method.parameters()):
        fully_shard(distiller.method, mesh=mesh)


def test_processes(expected, tmp_path):
    """DistributedDataParallel that looks for unused parameters: test_splits.py."""
    ends = [0, 5, 8]
    for curves in run_ranks(by_processes, 2, tmp_path, ends, list(WAYS)):
        for (_, name), curve in curves.items():
            assert_one_curve(curve, expected[name])
