"""docs/support.md equals the results of the code."""

import pytest

from tests.distill.support import ALL, FAMILIES, INTRODUCTION, PAGE, WRITTEN, heads, mark, rows_of

TABLE = PAGE.read_text()
LINES = [line.strip("| ").split(" | ") for line in TABLE[len(INTRODUCTION) :].splitlines()]


# A step of every head and method takes three times as long: `python -m tests.distill.support`.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    """Every head, and every method with one of them, which differs from family to family.

    Heads of few families have all methods, so that each pair of head and method is checked.
    """
    written = {
        head: dict(zip(ALL, marks, strict=False))
        for name, listed, *marks in LINES
        if name == family
        for head in listed.split(", ")
    }
    count, first = len(list(heads(family))), list(FAMILIES).index(family)

    def methods(number, head):
        few = head in ("sound", *WRITTEN)
        return ALL if few else ALL[(number + first) % count :: count]

    rows = dict(rows_of(family, methods))
    assert rows.keys() == written.keys()
    for head, found in rows.items():
        for name, why in found.items():
            assert mark(why) == written[head][name], (head, name, why)


def test_the_page_lists_no_other_family():
    assert TABLE.startswith(INTRODUCTION)
    assert {name for name, *_ in LINES} == set(FAMILIES)
