"""Every case of the suite at toy size: providers agree with the oracle or say why they can't."""

import pytest
import torch

from fastkd.bench import harness, passes, runner, suite
from tools import gpu_check

CPU = torch.device("cpu")


def one_of_each():
    """One toy case for each loss, title and dtype."""
    cases = [suite.toy(case) for case in suite.every_case() if case.loss != "step"]
    return list({(c.loss, c.title, c.dtype): c for c in cases}.values())


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.key)
def test_providers_agree_with_the_oracle(case):
    oracle = harness.oracle_of(case, CPU)
    ran = set()
    for provider in case.providers:
        if provider.name == "torch.compile" or provider.why_not(CPU):
            continue
        result = harness.check(oracle, provider)
        if "refused" in result:
            # A peer may round more than is allowed in a half type; in float32 it has to agree.
            peer = provider.name != "reference" and not harness.ours(case.loss, provider.name)
            assert peer and case.dtype == torch.bfloat16, (provider.name, result)
            continue
        ran.add(provider.name)
    assert "reference" in ran and any(name.startswith("fastkd") for name in ran)
    assert case.bytes_moved > 0 and case.operations > 0


def test_sets_and_losses():
    cases = suite.every_case()
    assert {case.set for case in cases} == set(suite.SETS)
    assert {case.loss for case in cases} == set(suite.LOSSES)
    for name in suite.SETS:
        keys = [case.key for case in suite.cases([name])]
        assert keys and len(keys) == len(set(keys))
    assert {case.loss for case in suite.cases(["cpu"])} == set(suite.LOSSES)
    # Where a GPU is, each of its sets has something for the README.
    assert all(any(c.headline for c in suite.cases([s])) for s in ("cpu", "bert", "long", "bank"))


def test_floors_of_known_work():
    # 8 samples of 4096 tokens, 2048 and 4096 features: 1.74 ms at 790 TFLOP/s.
    (case,) = [c for c in suite.cases(["long"], ["relation"]) if c.sizes["N"] == 4096]
    assert case.operations / 790e12 * 1e3 == pytest.approx(1.74, rel=0.01)
    # 8192 × 152,064 logits in bfloat16, two reads and a write: 1.74 ms at 4.3 TB/s.
    (case,) = [
        c
        for c in suite.cases(["vocab"], ["soft_targets"])
        if c.sizes["V"] == 152064 and c.title == "forward KL"
    ]
    assert case.bytes_moved / 4.3e12 * 1e3 == pytest.approx(1.74, rel=0.01)


def test_wrong_choices_are_named():
    with pytest.raises(runner.WrongChoice, match="did you mean 'bert'"):
        runner.run(["brt"])
    with pytest.raises(runner.WrongChoice, match="did you mean 'relation'"):
        runner.run(["cpu"], ["relations"])
    with pytest.raises(ValueError, match="no case of knn in set vocab"):
        runner.run(["vocab"], ["knn"])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            runner.run(["cpu"], device="cuda")


def test_what_goes_wrong_is_one_sentence(monkeypatch, tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from fastkd.cli.main import app

    command = ["bench", "--out", str(tmp_path), "--only"]
    result = CliRunner().invoke(app, [*command, "relations"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: only must") and "did you mean" in result.stderr

    def fails(*given, **options):
        raise passes.PassFailed("a later pass failed")

    monkeypatch.setattr(runner, "run", fails)
    result = CliRunner().invoke(app, [*command, "relation"])
    assert (result.exit_code, result.stderr) == (1, "Error: a later pass failed\n")


def test_digests_repeat():
    """What gpu-check compares between processes, here on the CPU."""
    first, second = (list(gpu_check.digests("toy", CPU)) for _ in range(2))
    assert first == second and len(first) >= 10
    assert all("fastkd torch" in line or "fastkd " in line for line in first)


def test_gpu_check_needs_a_gpu(capsys):
    if not torch.cuda.is_available():
        assert gpu_check.main([]) == 2
        assert "needs a CUDA device" in capsys.readouterr().out
