"""docs/support.md equals the results of the code."""

import random

import pytest

from tests.distill.support import ALL, FAMILIES, INTRODUCTION, PAGE, WRITTEN, mark, rows_of
from tests.support.draw import FIRST

TABLE = PAGE.read_text()
LINES = [line.strip("| ").split(" | ") for line in TABLE[len(INTRODUCTION) :].splitlines()]


# A step of every head and method takes a minute: `python -m tests.distill.support`.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    """Every head, with methods that are drawn; of heads of few families twice as many."""
    written = {
        head: dict(zip(ALL, marks, strict=False))
        for name, listed, *marks in LINES
        if name == family
        for head in listed.split(", ")
    }
    draw = random.Random(f"{FIRST} {family}")

    def methods(number, head):
        return draw.sample(ALL, 2 if head in ("sound", *WRITTEN) else 1)

    rows = dict(rows_of(family, methods))
    assert rows.keys() == written.keys()
    for head, found in rows.items():
        for name, why in found.items():
            assert mark(why) == written[head][name], (head, name, why)


def test_the_page_lists_no_other_family():
    assert TABLE.startswith(INTRODUCTION)
    assert {name for name, *_ in LINES} == set(FAMILIES)
