"""``python -m tools.contract``: the signatures in docs/design.md, written from the code.

The default of several fixed words comes first; the rules of every loss list ``backend``'s.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import fastkd
from fastkd._core.registry import LOSSES

PAGE = Path(__file__).parents[1] / "docs" / "design.md"
BEGIN, END = "<!-- Signatures, by `python -m tools.contract` -->\n", "<!-- end of signatures -->"
# Arguments of losses, not called themselves.
PARTS = ("CrossEntropy", "Divergence", "Head", "ImportanceRatio", "TopK", "VocabularyMatch")


def words(kind: Any) -> list[str]:
    """The fixed words of an annotation, alone or beside other types."""
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind)
    return [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]


def arguments(function: Callable[..., Any]) -> str:
    """``student, mask=None, *, over="tokens"|"samples"``."""
    kinds, written, starred = get_type_hints(function), [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            written.append("*")
            starred = True
        default = parameter.default
        if default is inspect.Parameter.empty:
            written.append(name)
        elif isinstance(default, str):
            others = [] if name == "backend" else words(kinds[name])
            ordered = dict.fromkeys([default, *others])
            written.append(f"{name}=" + "|".join(f'"{word}"' for word in ordered))
        else:
            written.append(f"{name}={default!r}")
    return ", ".join(written)


def signature(name: str) -> str:
    """A Module's options, then the arguments of its call."""
    public = getattr(fastkd, name)
    if not inspect.isclass(public):
        return f"{name}({arguments(public)})"
    made = f"{name}({arguments(public.__init__)})"
    return made if name in PARTS else f"{made}({arguments(public.forward)})"


def lines() -> Iterator[str]:
    """Signatures of each file of losses, below its name."""
    for loss in LOSSES:
        yield f"# {loss.module.removeprefix('fastkd.').replace('.', '/')}.py"
        yield from map(signature, (*loss.with_reference, *loss.without_reference, *loss.modules))
    yield "# Arguments of soft targets"
    yield from map(signature, PARTS)


def page(text: str) -> str:
    """``text`` with its signatures as the code has them."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}```text", *lines(), f"```\n{END}{after}"])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
