"""Every loss on every backend: worked examples and random calls.

The random calls are new in every run; a failure prints the command that repeats it.
"""

import time

import pytest
import torch

from tests import fuzz
from tests.support.draw import FIRST
from tests.support.every import inputs_of, rows
from tests.support.interpreter import MARKS

# CPU time of all random calls together, without the last of each; `make fuzz` has more.
SECONDS = 55
CASES = [
    pytest.param(name, backend, marks=MARKS.get(backend, ()), id=f"{backend}: {name}")
    for name in fuzz.FUNCTIONS
    for backend in fuzz.backends(name)
]

# `gathered` draws one of eight losses; what items do to each other in `cca` is seldom seen.
SHARES = dict.fromkeys(fuzz.FUNCTIONS, 1) | {"gathered": 6, "cca": 4}


@pytest.mark.parametrize(("file", "runs_on"), rows("examples", "reference"))
def test_worked_examples(file, runs_on, device):
    with inputs_of(runs_on, device):
        for name, found, expected in file.examples(runs_on):
            expected = torch.as_tensor(expected).to(found)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("name", "runs_on"), CASES)
def test_random_calls_agree_with_the_oracles(name, runs_on):
    found = [
        seed for function, backend, seed in fuzz.FOUND if (function, backend) == (name, runs_on)
    ]
    share = SECONDS / sum(SHARES[case.values[0]] for case in CASES) * SHARES[name]
    end, seed, failures = time.process_time() + share, FIRST, []
    while found or seed == FIRST or time.process_time() < end:
        if not found:
            seed += 1
        chosen = found.pop() if found else seed
        wrong = fuzz.checked(name, runs_on, chosen)
        if wrong:
            failures.append(f"{fuzz.pasted(name, runs_on, chosen)}\n{wrong}")
    assert not failures, f"{len(failures)} of {seed - FIRST} calls\n" + "\n".join(failures[:3])
