"""Pages come from the result files and say what no file holds."""

import json

import pytest

from fastkd.bench import harness, plots, report, suite


def provider(ms, ratio, peak=2**20):
    times = {"median": ms, "q1": 0.9 * ms, "q3": 1.1 * ms}
    return {
        "rounds": 9, "both": times, "forward": times, "backward": times, "peak_bytes": peak,
        "ratio": {"median": ratio, "q1": 0.9 * ratio, "q3": 1.1 * ratio},
        "value_error": 0.0, "gradient_error": 1e-6,
    }  # fmt: skip


def result_file(name="somewhere", gpu=None):
    """Half of the cpu set, with figures that can be found again."""
    providers = {
        "reference": provider(8.25, 1.0, 4 * 2**20),
        "fastkd torch": provider(2.75, 1 / 3),
        "torch.compile": provider(5.5, 2 / 3),
        "pykeops": {"skipped": "pykeops is not installed"},
        "wrong": {"refused": "value is off"},
    }
    rows = [
        harness.row_of(case, providers) | {"floor_ms": 0.5} for case in suite.cases(["cpu"])[::2]
    ]
    machine = {"name": name, "cpu": "A CPU", "threads": 2, "cores": 2, "system": "Linux x86_64"}
    if gpu:
        machine["gpu"] = gpu
    return {
        "format": 2, "machine": machine, "versions": {"python": "3.12", "torch": "2.13.0"},
        "commit": "abc1234", "date": "2026-01-02", "rows": rows,
        "roofline": {"copy_bytes_per_s": 2e10, "float32_ops_per_s": 1e11},
    }  # fmt: skip


def test_the_memory_of_language_models():
    result = result_file()
    assert not report.words_section(result)
    peaks = {"none": 1000, "heads": 1050, "logits": 3000}
    measured = {"rows": [], "sizes": {"V": 151936, "tokens": 1024}, "peak_mib": peaks}
    result["words"] = result | measured
    text = "\n".join(report.words_section(result))
    assert "| `Distiller` | 1050 | 1.05× |" in text and "V 151936, tokens 1024" in text


def test_heads_stand_beside_their_peers():
    """A line a size, a column for each that ran at any."""
    timed = provider(8.25, 1.0, 2 * 2**20)
    rows = []
    for case in suite.cases(["words"]):
        found = {p.name: timed for p in case.providers if p.name != "torch, linear"}
        rows.append(harness.row_of(case, found | {"trl": {"skipped": "trl is not installed"}}))
    text = "\n".join(report.heads_section(result_file() | {"rows": rows}))
    first, second = text.split("#### From hidden states, ")[1:]
    assert first.startswith(
        "cross-entropy\n| rows, V, dtype | plain torch | fastkd | torch, chunked |"
    )
    assert "| 2048, 151936, bf16 | 8.25 ms, 2.0 (1e-06) |" in first
    assert second.startswith("Jensen-Shannon") and "liger-kernel, chunked" in second
    assert "trl" not in text and len(first.splitlines()) > len(second.splitlines()) > 10


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for result in (result_file(), result_file("device", "Some GPU")):
        (folder / f"{result['machine']['name']}.json").write_text(json.dumps(result))
    return folder


def test_the_page_has_every_figure_and_names_the_gaps(results, tmp_path):
    out = tmp_path / "docs" / "benchmarks.md"
    assert report.main(["--results", str(results), "--out", str(out)]) == 0
    text = out.read_text()
    assert text.index("## Some GPU") < text.index("## A CPU, 2 threads")
    for part in ("abc1234", "torch 2.13.0", "8.25", "2.75", "3.0×", "pykeops is not installed"):
        assert part in text
    assert "wrong: value is off" in text
    measured = {case.key for case in suite.cases(["cpu"])[::2]}
    for case in suite.every_case():
        if case.key not in measured:
            assert f"- {case.key.replace('/', ', ')}" in text
    pictures = sorted((out.parent / "pictures").glob("*.png"))
    assert len(pictures) == 8 and all(f"pictures/{p.name}" in text for p in pictures)


def test_the_readme_is_filled_between_its_markers(results):
    table = report.readme_table(report.load(results))
    text = f"# x\nbefore\n{report.START}\nold\n{report.END}\nafter\n"
    filled = report.fill_readme(text, table)
    assert filled.startswith("# x\nbefore\n") and filled.endswith("\nafter\n")
    assert "old" not in filled and report.fill_readme(filled, table) == filled
    for part in ("abc1234", "Some GPU", "| 8.25 | 2.75 | 3.0× ± 10% | 2.00× ± 10% | 25% |"):
        assert part in filled
    assert "GPU figures" not in filled
    one, two = result_file(), result_file()
    one["machine"] = one["machine"] | {"threads": 1}
    table = report.readme_table([one, two])
    assert "GPU figures: not measured" in table and "A CPU, 2 threads" in table
    assert "A CPU, 1 thread" not in table and "A CPU, 1 thread," in report.readme_table([one])
    with pytest.raises(ValueError, match="needs the two lines"):
        report.fill_readme("no markers", table)


def test_no_results_is_one_sentence(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path)]) == 2
    assert "run make bench first" in capsys.readouterr().err


def test_pictures_only_where_there_is_something_to_draw(tmp_path):
    nothing = result_file()
    nothing["rows"] = []
    assert plots.draw(nothing, tmp_path) == []
