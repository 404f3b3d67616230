"""``docs/versions.json``, what each run found, and ``docs/versions.md``, the table made from it."""

import json
import re
from pathlib import Path

from packaging.version import Version

RESULTS = Path(__file__).parents[2] / "docs" / "versions.json"
PAGE = RESULTS.with_suffix(".md")
PACKAGES = ("torch", "triton", "transformers", "numpy")
KEY = ("torch", "transformers", "python")
COUNTS = ("passed", "skipped", "failed")
COLUMNS = (*PACKAGES, "python", "parameters", *COUNTS, "built with", "wheel", "commit", "date")
START = "<!-- table:start -->\n"
END = "<!-- table:end -->\n"

Row = dict[str, str | int]


def numbers(version: str | int) -> tuple[int, ...]:
    """For sorting; what follows the numbers, such as ``+cpu``, doesn't count."""
    return Version(str(version)).release


def counts(line: str) -> Row:
    """Of pytest's last line; an error is a failure."""
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed|error)", line)}
    found["failed"] = found.get("failed", 0) + found.pop("error", 0)
    return {name: found.get(name, 0) for name in COUNTS}


def record(outcome: Row) -> None:
    """Keep the outcome, one a combination of versions, and write the table."""
    rows = [row for row in read() if any(row[k] != outcome[k] for k in KEY)] + [outcome]
    rows.sort(key=lambda row: [numbers(row[k]) for k in KEY])
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page())


def read() -> list[Row]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def page() -> str:
    """The page with the table of the results in its place."""
    before, _, rest = PAGE.read_text().partition(START)
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(str(row[c]) for c in COLUMNS) + " |" for row in read()),
    ]
    return before + START + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
