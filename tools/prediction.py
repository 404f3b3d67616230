"""What a case should take on a GPU that is not there, from the compiled code of its kernels.

`recording` notes each launch and each of PyTorch's operations of fastkd's own provider, forward and
backward, and `machine_code` says what a program does. What follows turns that into seconds, and
names what binds.
"""

import collections
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.case import Case

from .machine_code import Assumed, InMemory, Launch, Site, compiled, executed, work


@dataclass(frozen=True)
class Gpu:
    """Figures of the manufacturer's data sheets, and shares of them that are reached."""

    name: str
    capability: int
    processors: int
    clock: float  # Hz, boost
    bandwidth: float  # bytes/s of the memory
    cache_bandwidth: float  # bytes/s of the L2 cache
    cache: float  # its bytes
    shared: int  # bytes of shared memory a processor
    rates: dict[str, float]  # operations/s by arithmetic, dense


HOPPER_RATES = {"bf16": 989e12, "f16": 989e12, "tf32": 494e12, "f32": 67e12, "f64": 67e12}
AMPERE_RATES = {"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "f32": 19.5e12, "f64": 19.5e12}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 90, 132, 1.83e9, 4.8e12, 5.5e12, 50e6, 228 * 1024, HOPPER_RATES),
        Gpu("h100", 90, 132, 1.83e9, 3.35e12, 5.5e12, 50e6, 228 * 1024, HOPPER_RATES),
        Gpu("a100", 80, 108, 1.41e9, 2.04e12, 4.0e12, 40e6, 164 * 1024, AMPERE_RATES),
    )
}
# Rules of thumb, none of them measured here.
REACHED = {"memory": 0.9, "tensor cores": 0.8}  # share of a data sheet's figure
ONE_WARP_PRODUCTS = 0.62  # of the rate on sm_90, where a warp issues them rather than four
PARTS = {"bf16x3": ("bf16", 3), "bf16x6": ("bf16", 6), "tf32x3": ("tf32", 3), "ieee": ("f32", 1)}
SCHEDULERS = 4  # of a processor, an instruction a cycle each
CYCLES_OF_ONE_WARP = 2  # between two of its instructions
REGISTERS, WARPS, BLOCKS = 65536, 64, 32  # most on one processor
LATENCY = 0.6e-6  # of memory, that a loop waits for which has one trip's loads in flight
LAUNCH = 2e-6  # least from one kernel's start to the next one's on the device
HOST_LAUNCH, HOST_OPERATION = 11e-6, 5e-6  # Python: a Triton launch, an operation of PyTorch
# Launches and passes over its input of operations that are more than one kernel.
SEVERAL = {"sort": (8, 16), "searchsorted": (1, 1), "argsort": (8, 16)}


@dataclass
class Kernel:
    """One launch, or one operation of PyTorch, and the seconds that each limit allows."""

    name: str
    launches: int
    programs: int
    seconds: dict[str, float]
    waves: float = 0.0  # of programs on the processors
    detail: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def bound(self) -> str:
        return max(self.seconds, key=lambda limit: self.seconds[limit])

    @property
    def total(self) -> float:
        return max(*self.seconds.values(), LAUNCH * self.launches)


def resident(gpu: Gpu, warps: int, registers: int, shared: int) -> int:
    """Programs that one processor holds at a time."""
    for_each_warp = math.ceil(max(registers, 1) * 32 / 256) * 256
    return max(
        1,
        min(
            BLOCKS,
            WARPS // warps,
            REGISTERS // (for_each_warp * warps),
            gpu.shared // (shared + 1024),
        ),
    )


def memory_seconds(
    gpu: Gpu, sites: Sequence[Site], sizes: dict[int, int], programs: int
) -> tuple[float, float]:
    """Seconds of the memory and of the L2 cache for a program's loads and stores, its ``sites``.

    Every site reaches each byte of its tensors once in memory, and what it asks for beyond is
    served by the cache; tensors smaller than half of the cache come from memory once.
    """
    asked = moved = 0.0
    seen: set[int] = set()
    for places, count in sites:
        asked += programs * count
        size = sum(sizes.get(place, 0) for place in places) or programs * count
        if size > gpu.cache / 2 or not places <= seen:
            moved += min(programs * count, size)
        seen |= places
    return moved / (gpu.bandwidth * REACHED["memory"]), asked / gpu.cache_bandwidth


def issue_seconds(gpu: Gpu, instructions: float, warps: int, programs: int, fit: int) -> float:
    """Of ``instructions`` a warp: the busiest processor's, or those of one warp in every wave."""
    busiest = math.ceil(programs / gpu.processors)
    shared = busiest * instructions * warps / SCHEDULERS
    alone = math.ceil(busiest / fit) * instructions * CYCLES_OF_ONE_WARP
    return max(shared, alone) / gpu.clock


def product_seconds(gpu: Gpu, products: dict[str, float], programs: int, wide: bool) -> float:
    """Of ``products``, a program's operations by arithmetic, on the busiest processor."""
    seconds = 0.0
    for kind, operations in products.items():
        arithmetic, parts = PARTS.get(kind, (kind, 1))
        rate = gpu.rates.get(arithmetic, gpu.rates["f32"]) * REACHED["tensor cores"]
        if gpu.capability >= 90 and not wide and arithmetic not in ("f32", "f64"):
            rate *= ONE_WARP_PRODUCTS
        seconds += parts * operations * math.ceil(programs / gpu.processors) * gpu.processors / rate
    return seconds


def kernel(gpu: Gpu, launch: Launch, assumed: Assumed) -> Kernel:
    """The limits of one launch."""
    made = compiled(launch.form)
    programs = math.prod(launch.grid)
    done = work(made.ttir, launch.arguments, launch.grid, assumed)
    warps = launch.form.num_warps
    fit = resident(gpu, warps, made.registers, made.shared)
    waves = programs / (gpu.processors * fit)
    of_tensors = {i: x.bytes for i, x in enumerate(launch.arguments) if isinstance(x, InMemory)}
    memory, cache = memory_seconds(gpu, [*done.loads, *done.stores], of_tensors, programs)
    instructions = executed(made.code, done.trips)
    in_flight = max(launch.form.num_stages - 1, 1) if done.products else 1
    return Kernel(
        launch.form.name,
        1,
        programs,
        {
            "memory": memory,
            "L2 cache": cache,
            "instructions": issue_seconds(gpu, instructions, warps, programs, fit),
            "tensor cores": product_seconds(gpu, done.products, programs, made.wide_products),
            "latency": math.ceil(waves) * (done.waits / in_flight + 1) * LATENCY,
        },
        waves,
        {
            "instructions": instructions,
            "warps": warps,
            "programs a processor": fit,
            "registers": made.registers,
            "shared": made.shared,
            "operations": programs * sum(done.products.values()),
            "bytes": programs * sum(site.bytes for site in [*done.loads, *done.stores]),
        },
        tuple(sorted(done.unknown)),
    )


def assumption(case: Case, launch: Launch, turn: int) -> Assumed:
    """What can't be seen without data; ``turn`` counts the case's launches of this kernel."""
    name, fixed = launch.form.name, launch.form.constexprs
    if name == "knn_search_kernel":  # the rows of the bank that have a tile's label
        rows = case.sizes["M"] / case.sizes["classes"] / launch.grid[1]
        return Assumed(trips=math.ceil(rows / fixed["BLOCK_M"]))
    if name == "cayley_finish_kernel":  # nothing is left for it
        return Assumed(trips=0)
    if name == "cayley_step_kernel":
        # From a guess, two rounds' products: a residual, a step, half of a last one. Without one,
        # log4 b² + 5 rounds, where ‖Q‖² is n/2 in the benchmark.
        rounds = 2 if case.title != "Cayley" else math.log(1 + case.sizes["D"] / 4, 4) + 5
        if turn < rounds:
            size = max(case.sizes.values()) if "D" not in case.sizes else case.sizes["D"]
            return Assumed(trips=math.ceil(size / fixed["BLOCK_K"]), both=True)
        return Assumed(trips=0)
    return Assumed()


def operation(gpu: Gpu, name: str, moved: int, operations: int, arithmetic: str) -> Kernel:
    """One of PyTorch's: its inputs and outputs once, its matrix products at their rate."""
    launches, passes = SEVERAL.get(name, (1, 1))
    rate = gpu.rates[arithmetic] * REACHED["tensor cores"]
    seconds = {
        "memory": passes * moved / (gpu.bandwidth * REACHED["memory"]),
        "tensor cores": operations / rate,
    }
    return Kernel(f"aten {name}", launches, 0, seconds, detail={"operations": operations})


@dataclass
class Prediction:
    """All kernels of one step, forward and backward."""

    case: Case
    kernels: list[Kernel]
    floor: float
    problem: str | None = None

    @property
    def device(self) -> float:
        """Seconds as a CUDA graph would replay it."""
        return sum(kernel.total for kernel in self.kernels)

    @property
    def host(self) -> float:
        """Seconds that Python needs to start it all."""
        return sum(
            HOST_OPERATION * k.launches if k.name.startswith("aten") else HOST_LAUNCH
            for k in self.kernels
        )

    @property
    def total(self) -> float:
        return max(self.device, self.host)

    @property
    def bound(self) -> str:
        """What most of the time goes into."""
        if self.host > self.device:
            return "host"
        spent: dict[str, float] = {}
        for k in self.kernels:
            limit = k.bound if k.total > LAUNCH * k.launches else "launches"
            spent[limit] = spent.get(limit, 0.0) + k.total
        return max(spent, key=lambda limit: spent[limit]) if spent else "nothing"

    def row(self) -> dict[str, Any]:
        """As JSON holds it, in milliseconds."""
        return {
            "key": self.case.key,
            "set": self.case.set,
            "predicted_ms": 1e3 * self.total,
            "device_ms": 1e3 * self.device,
            "host_ms": 1e3 * self.host,
            "floor_ms": 1e3 * self.floor,
            "bound": self.bound,
            "launches": sum(k.launches for k in self.kernels),
            "problem": self.problem,
            "kernels": [
                {
                    "name": k.name,
                    "programs": k.programs,
                    "waves": k.waves,
                    "bound": k.bound,
                    "us": 1e6 * k.total,
                    "limits_us": {name: 1e6 * x for name, x in k.seconds.items()},
                    "detail": k.detail,
                    "assumed": list(k.unknown),
                }
                for k in self.kernels
            ],
        }


def floor(gpu: Gpu, case: Case) -> float:
    """Of the case's least bytes and operations; float32 products in three parts of bfloat16."""
    name = {"bfloat16": "bf16", "float16": "f16", "float64": "f64"}.get(
        str(case.dtype).removeprefix("torch."), ""
    )
    rate = gpu.rates.get(name, gpu.rates["bf16"] / 3) * REACHED["tensor cores"]
    return max(case.bytes_moved / (gpu.bandwidth * REACHED["memory"]), case.operations / rate)


def predict(gpu: Gpu, cases: Sequence[Case]) -> Iterator[Prediction]:
    """Run the cases without a GPU, and predict each."""
    from .recording import Recorder  # brings Triton, which must not be its interpreter

    recorder = Recorder(gpu.capability)
    for case in cases:
        recorded, problem = recorder.record(case)
        turns: collections.Counter[str] = collections.Counter()
        kernels = []
        for item in recorded:
            if isinstance(item, Launch):
                kernels.append(kernel(gpu, item, assumption(case, item, turns[item.form.name])))
                turns[item.form.name] += 1
            else:
                kernels.append(operation(gpu, *item))
        yield Prediction(case, kernels, floor(gpu, case), problem)
