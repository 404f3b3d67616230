"""FCD's relations: `relation`, the oracle, and the tables of `tests/losses/__init__.py`."""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import fastkd
from tests.support import oracles
from tests.support.draw import BATCH, LENGTH, ROUNDINGS, WIDTH, Case, Draw, by_norm
from tests.support.subject import Subject, function_of, of_module

# The kernels take a float32 unit row as two float16 numbers times 4096. The second is a multiple of
# 2⁻²⁴. SPACING is the rounding error of rows too short for unit length, in roundings of 1.
SPACING = 2**-24 / 4096 / torch.finfo(torch.float32).eps


def relation(
    student, teacher, mask, over, normalize, distance, temperature, eps, spacing=0.0, factors=None
) -> Tensor:
    """FCD, eqs. 3-9: one relation a sample, or a token position, over its real members only.

    ``spacing``: of the entries of unit rows, in roundings of 1. ``factors`` of the samples' losses.
    """
    if over == "samples":
        student, teacher, mask = student.transpose(0, 1), teacher.transpose(0, 1), mask.mT
    losses, weights = [], []
    for i, (s, t, real) in enumerate(zip(student, teacher, mask, strict=True)):
        if int(real.sum()) < 2:
            continue
        weights.append(student.new_ones(()) if factors is None else factors[i])
        R_s, R_t = (_relation(x[real], normalize, spacing) for x in (s, t))
        if distance == "pearson":
            X, Y = R_s - R_s.mean(), R_t - R_t.mean()
            losses.append(1 - (X * Y).sum() / (oracles.norm(X) * oracles.norm(Y) + eps))
        elif distance == "mse":
            losses.append((R_s - R_t).square().mean() / 2)
        else:
            log_s, log_t = (torch.log_softmax(R.flatten() / temperature, 0) for R in (R_s, R_t))
            losses.append(temperature**2 * (log_t.exp() * (log_t - log_s)).sum())
    if not losses:
        return (student * 0).nan_to_num().sum()
    return (torch.stack(losses) * torch.stack(weights)).mean()


def _relation(x: Tensor, normalize: str, spacing: float) -> Tensor:
    if normalize == "l2":
        x = x / oracles.norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        x = oracles.rounded(x, len(x), 1)
        x = x + spacing * (oracles.rounded(torch.ones_like(x), *x.shape) - 1)
        if x.requires_grad:  # sums of products, up to 1/eps, that cancel along equal rows
            x.register_hook(lambda g: oracles.rounded(g, *g.shape))
    elif normalize == "layer_norm":
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    elif normalize == "softmax":
        x = oracles.rounded(x.softmax(-1), *x.shape)
    R = x @ x.mT
    # The products of unit rows are computed from differences.
    return R if normalize == "l2" else oracles.rounded(R, *R.shape)


def documents(x: Tensor, segments: Tensor) -> list[Tensor]:
    """Tokens (n, ...) of each document, row after row, of ``x`` (B, N, ...)."""
    return [x[b][row == n] for b, row in enumerate(segments) for n in row.unique()]


def unpacked(x: Tensor, segments: Tensor) -> Tensor:
    """Documents of ``x`` (B, N, ...) in rows of their own, padded with zeros."""
    found = documents(x, segments)
    return pad_sequence(found, batch_first=True) if found else x[:, :0]


def by_length(x: Tensor) -> Tensor:
    """`by_norm` of rows that `F.normalize` divides by 1e-12 at least."""
    return 1 / x.norm(dim=-1).clamp_min(1e-12)


def random_relation(draw: Draw) -> Case:
    B, N, D_s, D_t = draw.sizes(BATCH, LENGTH, WIDTH, WIDTH, zero=True)
    kernels, unit = draw.backend == "triton", draw.backend in ("triton", "cpp")
    options = {
        "over": draw.pick(["tokens", "samples"]),
        "normalize": "l2" if unit else draw.pick(["l2", "layer_norm", "softmax", "none"]),
        "distance": "pearson" if unit else draw.pick(["pearson", "mse", "kl"]),
        "temperature": draw.pick([0.5, 1.0, 10.0]),
        "eps": draw.pick([1e-8, 1e-4]),
    }
    rows: tuple[int, ...] = (B, N)
    if options["over"] == "samples" and draw.backend != "reference" and draw.chance(0.2):
        rows, N = (B,), 1  # embeddings (B, D)
    mask = draw.mask(*rows)
    weights, factors, segments = None, None, None
    if options["over"] == "tokens":
        weights, factors = draw.weights(mask.sum(1) >= 2)
    if B and N and len(rows) == 2 and draw.chance(0.2):
        segments = draw.labels(B * N).view(B, N)  # documents may be scattered over a row
        if weights is not None:
            weights = weights.nan_to_num(0.5)
            per_row = weights.double()
            factors = torch.stack(
                [per_row[b] for b, row in enumerate(segments) for _ in row.unique()]
            )
        else:
            factors = None
    wide = {"l2": (1e-18, 1e15, 1e30), "layer_norm": (0.1, 1e30)}.get(options["normalize"], (0.1,))
    if draw.dtype == torch.float16:
        wide = (0.1,)
    student, teacher = (draw.features(*rows, D, scales=wide) for D in (D_s, D_t))
    size = 1.0
    if options["normalize"] == "none" and student.numel() and teacher.numel():
        size = max(x.double().square().sum(-1).max().item() for x in (student, teacher))
    given = {} if segments is None else {"segments": segments}

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        pair = [student.reshape(B, N, D_s), teacher.reshape(B, N, D_t), mask.reshape(B, N)]
        if segments is not None:
            pair = [unpacked(x, segments) for x in pair]
        spacing = SPACING if kernels else 0.0
        return relation(*pair, **options, spacing=spacing, factors=factors)

    loss = draw.function("relation_loss")
    return Case(
        lambda student, teacher, mask: loss(
            student, teacher, mask, weights=weights, **given, **options
        ),
        oracle,
        {"student": student},
        {"teacher": teacher},
        {"mask": draw.mask_argument(mask)},
        scale={"mse": size**2, "kl": size * options["temperature"]}.get(options["distance"], 1.0),
        mask=mask,
        roundings=3 * ROUNDINGS,  # equal rows amplify them by up to 1/eps
        slope={
            "softmax": lambda x: x.new_ones(x.shape[:-1]),
            "none": None,
            "layer_norm": by_norm,
            "l2": by_length,
        }[options["normalize"]],
        of_rows=True,
        products=draw.dtype if kernels and draw.dtype != torch.float32 else None,
    )


def random_fcd(draw: Draw) -> Case:
    layers = draw.pick([1, 2, 3])
    B, N, *widths = draw.sizes(BATCH, LENGTH, *[WIDTH] * (2 * layers))
    unit = draw.backend != "torch"
    weights = {"alpha": draw.pick([0.0, 1.0, 2.5]), "beta": draw.pick([0.5, 1.0])}
    rest = {"temperature": draw.pick([0.5, 10.0]), "eps": draw.pick([1e-8, 1e-4])}
    rest["normalize"] = "l2" if unit else draw.pick(["l2", "l2", "layer_norm"])
    rest["distance"] = "pearson" if unit else draw.pick(["pearson", "pearson", "kl"])
    module, mask = draw.module(fastkd.FCDLoss, **weights, **rest), draw.mask(B, N)
    students = {f"s{i}": draw.features(B, N, D) for i, D in enumerate(widths[:layers])}
    teachers = {f"t{i}": draw.features(B, N, D) for i, D in enumerate(widths[layers:])}

    given = {"return_terms": True} if draw.chance(0.4) else {}
    if B and N and draw.chance(0.2):
        given["segments"] = draw.labels(B * N).view(B, N)

    def oracle(**x: Tensor) -> Tensor:
        pairs = [(x[s], x[t], mask) for s, t in zip(students, teachers, strict=True)]
        if "segments" in given:
            pairs = [tuple(unpacked(z, given["segments"]) for z in pair) for pair in pairs]
        loss = torch.zeros(()).double()
        for weight, over in ((weights["alpha"], "tokens"), (weights["beta"], "samples")):
            term = torch.stack([relation(*pair, over, **rest) for pair in pairs]).mean()
            loss = loss + weight * term + bool(weight and "return_terms" in given) * term.detach()
        return loss

    def call(mask: Tensor | None, **x: Tensor) -> Tensor:
        found = module([x[n] for n in students], [x[n] for n in teachers], mask, **given)
        return found[0] + sum(found[1].values()) if "return_terms" in given else found

    return Case(
        call,
        oracle,
        students,
        teachers,
        {"mask": draw.mask_argument(mask)},
        mask=mask,
        roundings=3 * ROUNDINGS,  # as for `relation`
        slope=by_length if rest["normalize"] == "l2" else by_norm,
        scale=rest["temperature"] if rest["distance"] == "kl" else 1.0,
        products=draw.dtype if draw.backend == "triton" and draw.dtype != torch.float32 else None,
    )


RANDOM = {"relation": random_relation, "fcd": random_fcd}


def subjects(backend: str) -> Iterator[Subject]:
    for over in ("tokens", "samples"):
        yield Subject(
            f"relation_loss over {over}",
            lambda s, t, m, over=over: fastkd.relation_loss(s, t, m, over=over, backend=backend),
        )
    yield of_module("FCDLoss", fastkd.FCDLoss(backend=backend))


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("relation_loss", backend)
    # Three unit rows at right angles against rows of which two coincide: R_s = I and
    # R_t = [[1,1,0],[1,1,0],[0,0,1]], with covariance 3 − 3·5/9 and variances 3 − 1 and 5 − 25/9.
    rows = torch.eye(3)[None], torch.tensor([[[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]])
    yield "three rows", loss(*rows), 1 - (3 - 15 / 9) / (2 * (5 - 25 / 9)) ** 0.5


def edges(backend: str) -> Iterator[tuple]:
    loss = function_of("relation_loss", backend)
    for over, members in itertools.product(("tokens", "samples"), (9, 40)):
        name = f"over {members} {over}"
        call = functools.partial(loss, over=over)
        shape = (2, members) if over == "tokens" else (members, 2)
        x, y, wide = torch.randn(*shape, 8), torch.randn(*shape, 7), torch.randn(*shape, 300)
        same = x[:1, :1].expand_as(x)
        yield f"{name}: equal student rows", lambda s, y=y, c=call: c(s, y), same, 1.0, 0.0, 1e-3
        # 1/eps multiplies differences of rows, not rows.
        yield f"{name}: wide teacher", lambda s, y=wide, c=call: c(s, y), same, 1.0, 0.0, 1e-3
        equal = wide[:1, :1].expand_as(wide)
        # Rounding error of the mean must not become a relation.
        yield f"{name}: equal teacher rows", lambda s, y=equal, c=call: c(s, y), x, 1.0, 0.0, 1e-5
        yield f"{name}: zeros", lambda s, y=y, c=call: c(s, y), 0 * x, 1.0, None
        some = (x * (x[..., :1] > 0)).half()  # float16 can't hold 1e12, the slope of a zero row
        yield f"{name}: some zeros", lambda s, y=y, c=call: c(s, y.half()), some, None, None
        yield f"{name}: itself", lambda s, y=x, c=call: c(s, y), x, 0.0, 0.0, 1e-5
    x = torch.randn(3, 2, 8)
    yield "two tokens have one relation", lambda s: loss(s, x), x.sin(), 0.0, 0.0


def growing() -> dict[str, tuple]:
    def calls() -> Iterator[tuple]:
        for n in (4, 9, 30):
            mask = torch.arange(n + 3) < torch.arange(2, n + 2)[:, None]
            yield torch.randn(n, n + 3, 24, requires_grad=True), torch.randn(n, n + 3, 16), mask

    layers = fastkd.FCDLoss(backend="torch")

    def twice(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        value, terms = layers([student, student], [teacher, teacher], mask, return_terms=True)
        return value + terms["tokens"]

    return {"layers passed twice, and terms": (twice, calls())}


def bad() -> Iterator[tuple[str, Callable]]:
    x, y = torch.randn(2, 2, 5, 8)
    loss, fcd = fastkd.relation_loss, fastkd.FCDLoss
    for call in (loss, fcd()):
        yield r"student is \(B, D\), which has no tokens to relate", lambda c=call: c(x[0], y[0])
        yield "student must have at least 2 dimensions", lambda c=call: c(x[0, 0], y[0, 0])
        yield "teacher must have 3 dimensions", lambda c=call: c(x, y[0])
        yield r"teacher must have shape \(2, 5, 8\)", lambda c=call: c(x, y[:, :4])
        for words, segments in (
            (r"segments must have shape \(2, 5\)", torch.zeros(2, 4).long()),
            ("segments must be integers, got torch.float32", torch.zeros(2, 5)),
            ("segments must be a Tensor, got list", [0] * 5),
        ):
            yield words, functools.partial(call, x, y, segments=segments)
    yield r"student must have shape \(2, 5, 8\)", lambda: fcd()([x, x[:, :4]], [y, y[:, :4]])
    yield r"mask must have shape \(2,\)", lambda: fcd(0)(x[:, 0], y[:, 0], torch.ones(2, 1))
    of_rows = functools.partial(fcd(0), x[:, 0], y[:, 0])
    words = "segments are document ids of tokens"
    yield words, functools.partial(of_rows, segments=torch.zeros(2).long())
    yield "take over='tokens'", lambda: loss(x, y, over="samples", weights=torch.ones(2))
    yield "temperature must be greater than 0", lambda: loss(x, y, temperature=0.0)
    yield "eps must be greater than 0", lambda: fcd(eps=0.0)

    def changed() -> None:
        module = fcd(beta=0)
        module.alpha = 0.0
        module(x, y)

    yield "alpha and beta are both 0", lambda: fcd(alpha=0, beta=0)
    yield "alpha and beta are both 0", changed
