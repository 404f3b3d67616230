"""Flag what got worse between two result files: ``python -m bench.compare A.json B.json``.

Times are compared as ratios to the reference of the same run, so a slower machine or a busy
moment does not count. A ratio is worse when it grew by more than ten per cent, which two runs of
the same code can differ by, and by more than the noise within the runs: several standard errors
of the two medians, taken from their quartiles, more of them where there were few rounds.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

LEAST = 0.10


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One sentence for every figure that got worse beyond the noise."""
    found = []
    rows = {row["key"]: row for row in before["rows"]}
    for row in after["rows"]:
        if row["key"] not in rows:
            continue
        for name, result in row["providers"].items():
            old = rows[row["key"]]["providers"].get(name, {})
            where = f"{row['key']}, {name}"
            if "both" not in result:
                if "both" in old:
                    reason = result.get("refused") or result.get("skipped")
                    found.append(f"{where}: no longer measured ({reason})")
                continue
            if "both" not in old:
                continue
            if "ratio" in result and "ratio" in old and worse(old, result):
                a, b = old["ratio"]["median"], result["ratio"]["median"]
                found.append(f"{where}: {a:.3g} -> {b:.3g} of the reference's time ({b / a:.2f}×)")
            # A single small allocation more is no news.
            if result.get("peak_bytes", 0) > 1.02 * old.get("peak_bytes", math.inf) + 65536:
                a, b = old["peak_bytes"] / 2**20, result["peak_bytes"] / 2**20
                found.append(f"{where}: peak memory {a:.2f} -> {b:.2f} MiB")
            if result.get("launches", 0) > old.get("launches", math.inf):
                found.append(f"{where}: launches {old['launches']} -> {result['launches']}")
    return found


def worse(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether ``after``'s ratio to the reference grew beyond the noise of both."""
    growth = math.log(after["ratio"]["median"] / before["ratio"]["median"])
    noise = math.hypot(_noise(before), _noise(after))
    return growth > max(math.log1p(LEAST), noise)


def _noise(result: dict[str, Any]) -> float:
    """How far the median ratio may be off by chance, relative to it.

    Standard error of a median of normal noise, times about Student's t at 99.95%: quartiles of
    five rounds say little about the spread.
    """
    ratio, rounds = result["ratio"], result["rounds"]
    sigma = (ratio["q3"] - ratio["q1"]) / 1.349 / ratio["median"]
    return 3.3 * (1 + 6 / (rounds - 1)) * 1.2533 * sigma / math.sqrt(rounds)


def main(arguments: list[str] | None = None) -> int:
    """Print what got worse; the exit status is 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = (json.loads(p.read_text()) for p in (options.before, options.after))
    if before["machine"] != after["machine"]:
        print(f"different machines: {before['machine']['name']}, {after['machine']['name']}")
    keys = [{row["key"] for row in results["rows"]} for results in (before, after)]
    for only, name in ((keys[0] - keys[1], options.before), (keys[1] - keys[0], options.after)):
        if only:
            print(f"{len(only)} rows only in {name}")
    found = compare(before, after)
    print("\n".join(found) or f"nothing got worse in {len(keys[0] & keys[1])} rows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
