"""Docstrings, which are written for a terminal, as the site's reference shows them."""

import re
from typing import Any

import griffe

SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): ")


def for_the_site(docstring: str) -> str:
    """Two arguments on one line become two entries of the same text, and examples a section."""
    lines = docstring.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(">>> ")), len(lines))
    if lines[first:]:
        lines[first:] = ["Examples:", *("    " + line for line in lines[first:])]
    written: list[str] = []
    while lines:
        entry = [lines.pop(0)]
        if several := SEVERAL.match(entry[0]):
            while lines and lines[0].startswith("     "):
                entry.append(lines.pop(0))
            text = entry[0][several.end() :]
            for name in several[1].split(", "):
                written += [f"    {name}: {text}", *entry[1:]]
        else:
            written += entry
    return "\n".join(written)


class ForTheSite(griffe.Extension):
    """Docstrings in the form that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = for_the_site(obj.docstring.value)
