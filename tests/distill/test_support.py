"""docs/support.md equals the results of the code."""

import random

import pytest

from tests.distill.models import FAMILIES
from tests.distill.support import ALL, heads, mark, rows_of, written
from tests.support.draw import FIRST

BEFORE, LINES = written()


# A step of every head and method takes a minute: `python -m tests.distill.support`.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    """Every head; some with a method that is drawn."""
    listed = {
        head: dict(zip(ALL, marks, strict=False))
        for name, alike, *marks in LINES
        if name == family
        for head in alike.split(", ")
    }
    assert {*heads(family)} == listed.keys()
    draw = random.Random(f"{FIRST} {family}")
    drawn = {x: draw.sample(ALL, int(draw.random() < 0.15)) for x in listed}
    for head, found in rows_of(family, drawn.get):
        for name, why in found.items():
            assert mark(why) == listed[head][name], (head, name, why)


def test_the_page_lists_no_other_family_and_every_method():
    assert BEFORE.splitlines()[-2] == f"| family | head | {' | '.join(ALL)} | |"
    assert {name for name, *_ in LINES} == set(FAMILIES)
