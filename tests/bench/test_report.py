"""Pages from pytest-benchmark's JSON; an empty cell was not measured."""

import json

import pytest

from bench import report, suite
from tests.bench import write_pages_to
from tests.support.compare import raises

MEASURED = "knn", "heads", "step"


def benchmark(case, provider, seconds, ratio=None, **more):
    info = {
        "loss": case.loss, "title": case.title, "sizes": case.sizes, "sweep": case.sweep,
        "dtype": str(case.dtype).removeprefix("torch."), "headline": case.headline,
        "bytes": case.bytes_moved, "operations": case.operations, "backend": provider,
        "peak_bytes": 2**20, "value_error": 0.0, "gradient_error": 1e-6, "commit": "abc1234",
        "ratio": {"q1": 0.9 * ratio, "median": ratio, "q3": 1.1 * ratio} if ratio else None,
    } | more  # fmt: skip
    info = {name: value for name, value in info.items() if name != "ratio" or value}
    return {"group": case.key, "extra_info": info, "stats": {"median": seconds}}


def result_file(name="somewhere", threads=2, **machine):
    """Results of some losses' cpu set, with distinct figures."""
    found = []
    for case in suite.cases(["cpu"], MEASURED):
        own = {"heads": "fastkd", "step": "FCD"}.get(case.loss, "fastkd cpp")
        found.append(benchmark(case, "reference", 8.25e-3, 1.0, peak_bytes=2**22))
        found.append(benchmark(case, own, 2.75e-3, 1 / 3))
        found.append(benchmark(case, "torch.compile", 5.5e-3, 2 / 3))
    known = suite.cases(["cpu"], ["knn"])[0]
    found.append(benchmark(known, "pykeops", 11e-3, 4 / 3))
    described = {"name": name, "cpu": "A CPU", "threads": threads, "versions": {"torch": "2.13.0"}}
    return {
        "machine_info": {**described, **machine}, "datetime": "2026-01-02T03:04:05",
        "limits": {"copy": 2e10, "float32": 1e11, "bfloat16": 1e11}, "benchmarks": found,
    }  # fmt: skip


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Writes result files and returns README's and the page's text."""
    write_pages_to(tmp_path, monkeypatch)

    def write(*results):
        for result in results:
            path = tmp_path / "RESULTS" / f"{result['machine_info']['name']}.json"
            path.write_text(json.dumps(result))
        assert report.main([]) == 0
        return (tmp_path / "README").read_text(), (tmp_path / "PAGE").read_text()

    return write


def test_pages_contain_the_measured_figures(pages, tmp_path):
    one, gpu = result_file("one", threads=1), result_file("gpu", gpu="Some GPU")
    case = suite.cases(["vocab"], ["soft_targets"])[2]
    for name, seconds in (("reference", 40e-3), ("fastkd triton", 4e-3), (report.GRAPH, 3e-3)):
        gpu["benchmarks"].append(benchmark(case, name, seconds, seconds / 40e-3))
    readme, page = pages(one, gpu, result_file())
    assert "old" not in readme + page
    for text in (
        "A CPU, 2 threads, torch 2.13.0, commit abc1234, 2026-01-02:",
        "| 8.25 | 2.75 | 3.0× ± 10% | 2.00× ± 10% | 25% |",
        "| contrastive: tokens | B=32 N=128 D=768, fp32 |  |  |  |  |  |",
        "V=152064, bf16 | 40 | 4 | 3 | 10.0× ± 10% |  | 100% |",
    ):
        assert text in readme
    for text in (
        "V=152064, bf16 | 40 |  | 4 | triton | 10.0× ± 10% |",
        "| 1e-06 |  | 3 |",  # graphs beside graphs
        "| pykeops | 11 | 2.75 | 4.0× ± 10% |",
        "| FCD | 2.75 | 0.33× | 1.0 | 25% |",
        "| 2.75 ms, 1.0 MiB (1e-06) |",
    ):
        assert text in page
    assert readme.index("Some GPU, torch 2.13.0") < readme.index("A CPU, 2 threads")
    places = [page.index(f"## {x}") for x in ("Some GPU", "A CPU, 2 threads", "A CPU, 1 thread")]
    assert places == sorted(places) and "| V" not in page
    pictures = sorted(path.name for path in (tmp_path / "PICTURES").glob("*.png"))
    growing = {case.loss for case in suite.cases(["cpu"], MEASURED) if case.sweep}
    assert len(pictures) == len(growing) and all(f"pictures/{name}" in page for name in pictures)


def test_without_results_every_cell_is_empty(pages):
    readme, page = pages()
    assert "Not measured yet: `make bench`" in readme and "`make bench` writes one" in page
    assert readme.count("|  |  |  |  |  |\n") == 10
    raises("needs the two lines", report.fill, "no markers", "table")


def test_runs_of_one_machine_are_merged(tmp_path):
    paths, case = [], suite.cases(["cpu"])[0]
    for number, ratio in enumerate((0.5, 0.9, 0.2)):
        result = result_file() | {"benchmarks": [benchmark(case, "fastkd cpp", ratio, ratio)]}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(result | {"limits": {"copy": 1e9 * number}}))
    joined = report.load(report.join(paths, tmp_path / "results"))
    assert joined["limits"] == {"copy": 2e9}
    assert list(joined["benchmarks"][0]["extra_info"]["sizes"]) == list(case.sizes)
    (provider,) = joined["groups"][case.key].values()
    assert provider["ms"] == 500 and provider["ratio"]["median"] == 0.5
    paths[0].write_text(json.dumps(result_file("elsewhere")))
    raises("several machines: elsewhere, somewhere", report.join, paths, tmp_path)
