"""The table of FCD's operations and memory."""

import re

from bench import fcd_complexity


def test_operations_are_those_of_the_paper(capsys):
    fcd_complexity.main(["-B", "4", "-N", "32", "-D", "192"])
    lines = [re.split(r" *\| *", line)[1:-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in lines[2:]] == [
        "FCD, fastkd",
        "FCD, as printed",
        "MiniLM",
        "MiniLMv2",
    ]
    printed, minilm = lines[3], lines[4]
    # 2BN²D + 2B²ND and 4BN²D; products alone are counted.
    assert printed[1] == printed[2] == f"{2 * (4 * 32**2 + 16 * 32) * 192 / 1e9:.4f}"
    assert minilm[1] == minilm[2] == f"{4 * 4 * 32**2 * 192 / 1e9:.4f}"
