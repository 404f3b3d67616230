"""Pages from pytest-benchmark's JSON; an empty cell was not measured."""

import json

import pytest

from bench import report, suite
from tests.support.compare import raises


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
    """Results of the cpu set without COS-NCE, with distinct figures."""
    found = []
    for case in suite.cases(["cpu"]):
        if case.loss != "contrastive":
            own = "fastkd" if case.loss == "heads" else "fastkd cpp"
            own = "FCD" if case.loss == "step" else own
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
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PICTURES", tmp_path / "pictures")
    (tmp_path / "results").mkdir()
    for name in ("README", "PAGE"):
        monkeypatch.setattr(report, name, tmp_path / name)
        (tmp_path / name).write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")

    def write(*results):
        for result in results:
            path = tmp_path / "results" / f"{result['machine_info']['name']}.json"
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
    assert "A CPU, 2 threads, torch 2.13.0, commit abc1234, 2026-01-02:" in readme
    assert "old" not in readme + page
    assert "| 8.25 | 2.75 | 3.0× ± 10% | 2.00× ± 10% | 25% |" in readme
    assert "| contrastive: tokens | B=32 N=128 D=768, fp32 |  |  |  |  |  |" in readme
    assert readme.index("Some GPU, torch 2.13.0") < readme.index("A CPU, 2 threads")
    assert "V=152064, bf16 | 40 | 4 | 3 | 10.0× ± 10% |  | 100% |" in readme
    assert "V=152064, bf16 | 40 |  | 4 | triton | 10.0× ± 10% |" in page
    assert "| 1e-06 |  | 3 |" in page  # graphs beside graphs
    assert page.index("## Some GPU") < page.index("## A CPU, 2 threads")
    assert page.index("## A CPU, 2 threads") < page.index("## A CPU, 1 thread")
    assert "| pykeops | 11 | 2.75 | 4.0× ± 10% |" in page
    assert "| FCD | 2.75 | 0.33× | 1.0 | 25% |" in page
    assert "| V" not in page and "| 2.75 ms, 1.0 MiB (1e-06) |" in page
    pictures = sorted(path.name for path in (tmp_path / "pictures").glob("*.png"))
    growing = {case.loss for case in suite.cases(["cpu"]) if case.sweep} - {"contrastive"}
    assert len(pictures) == len(growing) and all(f"pictures/{name}" in page for name in pictures)


def test_without_results_every_cell_is_empty(pages):
    readme, page = pages()
    assert "Not measured yet: `make bench`" in readme and "`make bench` writes one" in page
    assert readme.count("|  |  |  |  |  |\n") == 10


def test_runs_of_one_machine_are_merged(tmp_path):
    paths = []
    for number, ratio in enumerate((0.5, 0.9, 0.2)):
        case = suite.cases(["cpu"])[0]
        result = result_file() | {"benchmarks": [benchmark(case, "fastkd cpp", ratio, ratio)]}
        result["limits"] = {"copy": 1e9 * number}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(result))
    joined = report.load(report.join(paths, tmp_path / "results"))
    assert joined["limits"] == {"copy": 2e9}
    assert list(joined["benchmarks"][0]["extra_info"]["sizes"]) == list(case.sizes)
    (provider,) = joined["groups"][case.key].values()
    assert provider["ms"] == 500 and provider["ratio"]["median"] == 0.5
    other = result_file("elsewhere")
    paths[0].write_text(json.dumps(other))
    raises("several machines: elsewhere, somewhere", report.join, paths, tmp_path)


def test_a_page_without_markers_is_refused():
    raises("needs the two lines", report.fill, "no markers", "table")
