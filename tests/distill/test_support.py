"""docs/support.md equals the results of the code."""

import random

import pytest

from tests.distill.models import FAMILIES
from tests.distill.support import ALL, INTRODUCTION, PAGE, heads, mark, rows_of
from tests.support.draw import FIRST

TABLE = PAGE.read_text()
LINES = [line.strip("| ").split(" | ") for line in TABLE[len(INTRODUCTION) :].splitlines()]


# A step of every head and method takes a minute: `python -m tests.distill.support`.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    """Every head; some with a method that is drawn."""
    written = {
        head: dict(zip(ALL, marks, strict=False))
        for name, listed, *marks in LINES
        if name == family
        for head in listed.split(", ")
    }
    assert {*heads(family)} == written.keys()
    draw = random.Random(f"{FIRST} {family}")
    drawn = {x: draw.sample(ALL, int(draw.random() < 0.15)) for x in written}
    for head, found in rows_of(family, drawn.get):
        for name, why in found.items():
            assert mark(why) == written[head][name], (head, name, why)


def test_the_page_lists_no_other_family():
    assert TABLE.startswith(INTRODUCTION)
    assert {name for name, *_ in LINES} == set(FAMILIES)
