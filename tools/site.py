"""mkdocs hooks of `make docs`: equations, pages for linked files, docstrings.

matplotlib draws the pages' ```math blocks, so that a browser needs no network. A file outside of
docs/ that a page links to gets a page of its own. Docstrings are written for a terminal.
"""

import functools
import io
import json
import os
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

import griffe
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fastkd._core.registry import LOSSES

ROOT = Path(__file__).resolve().parents[1]
SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): ")
OUTWARD = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def equation(source: str, *args: Any, **kwargs: Any) -> str:
    """A ```math fence as a picture a line, in the colour of the text around it."""
    return "".join(map(_line, filter(None, map(str.strip, source.splitlines()))))


@functools.cache
def _line(source: str) -> str:
    drawn = io.StringIO()
    tex = re.sub(r"\\\\$", "", source)
    font = FontProperties(size=13, math_fontfamily="cm")
    math_to_image(f"${tex}$", drawn, prop=font, format="svg", color="#010203")
    svg = drawn.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace("#010203", "currentColor").replace("#ffffff", "none", 1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(tex)}"', 1)
    return f'<p class="equation">{" ".join(svg.split())}</p>'


def target(link: str, page: str) -> str | None:
    """The repository's file that a page of docs/ links to, if it isn't one of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages of each loss behind the page on the losses, in the order of its links."""
    (section,) = (entry["Losses"] for entry in config.nav or () if "Losses" in entry)
    links = re.findall(r"\]\((losses/\w+\.md)", (ROOT / "docs" / "losses.md").read_text())
    section += dict.fromkeys(links)
    return config


def members() -> str:
    """Names of each loss on the page of the API."""
    return "".join(
        f"::: {loss.module}\n    options:\n"
        f"      members: [{', '.join(loss.names)}]\n"
        "      show_root_heading: false\n      show_root_toc_entry: false\n"
        for loss in LOSSES
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page of its own for each file that pages link to."""
    wanted = {
        path
        for file in files.documentation_pages()
        for link in OUTWARD.findall(file.content_string)
        if (path := target(link, file.src_uri))
    }
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        uri = path.relative_to(ROOT / "docs").as_posix()
        files.remove(files.src_uris[uri])
        page = uri.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=notebook(f"docs/{uri}")))
    for path in sorted(wanted):
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f"# {path}\n\n```{Path(path).suffix[1:]}\n{text}```\n"
        files.append(File.generated(config, f"source/{path}.md", content=text))
    return files


def notebook(path: str) -> str:
    """A notebook with its outputs as a page."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![Picture of the cell above](data:image/png;base64,{png})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    def inside(match: re.Match[str]) -> str:
        path = target(match[1], page.file.src_uri)
        start = os.path.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(f'source/{path}.md', start)}" if path else match[0]

    markdown = markdown.replace("::: losses\n", members())
    return OUTWARD.sub(inside, markdown).replace(".ipynb)", ".md)")


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
