"""Language models' heads on the CPU: the memory of a step of two models, losses of many sizes.

``python -m fastkd.bench.words`` measures the peak memory of one step, with and without a loss,
every mode in a process of its own, then the cases of the set "words", and writes the result file
from which `report` makes its tables.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers as t

from fastkd._core.machine import slug
from fastkd.distill import Distiller, SoftTargets

from . import suite
from .report import MODES
from .runner import run_cases, write

V = 151936
FOLDER = Path(__file__).resolve().parent / "results" / "words"


def model(hidden: int, layers: int) -> t.PreTrainedModel:
    """A decoder of Qwen2's form."""
    config = t.Qwen2Config(
        vocab_size=V, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return t.Qwen2ForCausalLM(config)


def step(mode: str, teacher: t.PreTrainedModel, student: t.PreTrainedModel, tokens: int) -> int:
    """MiB that the process has held at most until the end of a step."""
    ids = torch.randint(5, V, (2, tokens // 2))
    if mode == "none":
        with torch.no_grad():
            teacher.model(ids)
        student.model(ids).last_hidden_state.sum().backward()
        student.lm_head.weight.grad = torch.ones_like(student.lm_head.weight)
    else:
        distiller = Distiller(teacher, student, SoftTargets(), keep_logits=mode == "logits")
        distiller(input_ids=ids, labels=ids).loss.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(arguments: list[str] | None = None) -> int:
    """Print a mode's peak, or write the file of all."""
    parser = argparse.ArgumentParser(prog="python -m fastkd.bench.words", description=__doc__)
    parser.add_argument("mode", nargs="?", choices=MODES)
    parser.add_argument("--teacher", type=int, default=512, help="its hidden size")
    parser.add_argument("--student", type=int, default=256, help="its hidden size")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--minutes", type=float, default=11, help="after which no case is begun")
    parser.add_argument("--commit", help="recorded where git can't tell")
    options = parser.parse_args(arguments)
    if options.mode:
        torch.manual_seed(0)
        models = model(options.teacher, 4).eval(), model(options.student, 2)
        print(step(options.mode, *models, options.tokens))
        return 0
    end = time.monotonic() + 60 * options.minutes
    sizes = {"V": V, **{name: getattr(options, name) for name in ("teacher", "student", "tokens")}}
    flags = [word for n, x in sizes.items() if n != "V" for word in (f"--{n}", str(x))]
    peaks = {}
    for mode in MODES:
        command = [sys.executable, "-m", "fastkd.bench.words", mode, *flags]
        peaks[mode] = int(subprocess.check_output(command, text=True))
    print(peaks)
    device = torch.device("cpu")
    path = FOLDER / f"{slug(device)}.json"
    results = run_cases(
        suite.cases(["words"]), device, path, commit=options.commit, seconds=0.5, passes=1,
        fewest=3, budget=end - time.monotonic(),
    )  # fmt: skip
    write(path, {**results, "sizes": sizes, "peak_mib": peaks})
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
