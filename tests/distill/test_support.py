"""docs/support.md equals the results of the code."""

import pytest

from tests.distill.support import FAMILIES, INTRODUCTION, PAGE, lines_of

TABLE = PAGE.read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    written = [line for line in TABLE.splitlines() if line.startswith(f"| {family} |")]
    assert list(lines_of(family)) == written


def test_the_page_lists_no_other_family():
    assert TABLE.startswith(INTRODUCTION)
    listed = {line.split("|")[1].strip() for line in TABLE[len(INTRODUCTION) :].splitlines()}
    assert listed == set(FAMILIES)
