"""``python -m tools.host_time`` runs every call over its stub of libcuda."""

import ctypes
import json
import shutil

import pytest

pytest.importorskip("triton.backends.nvidia")

from tools.host_time import __main__ as host_time

OF_TRITON_3_8 = ("cuCtxGetDevice", "cuModuleUnload", "cuPointerGetAttributes")


@pytest.mark.thorough  # compiles the stub
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_measures_calls_and_counts_launches(monkeypatch, capsys):
    names = [
        "hidden_states/mse/B32 N128 D768/bfloat16",
        "soft_targets/forward KL/rows32 V2/bfloat16",
    ]
    measured = host_time.measure(host_time.ROOT, 5, names)
    monkeypatch.setattr(host_time, "measure", lambda *_: measured)
    printed = []
    for words in (["--json"], []):
        monkeypatch.setattr("sys.argv", ["host_time", *words, *names])
        host_time.main()
        printed.append(capsys.readouterr().out)
    found, table = json.loads(printed[0]), printed[1].splitlines()
    assert set(found) == set(names)
    for forward, backward, launches in found.values():
        assert 1 < forward < 1e5 and 1 < backward < 1e5 and launches >= 2
    stub = ctypes.CDLL(str(host_time.BUILD / "libcuda.so.1"))
    assert all(hasattr(stub, name) for name in OF_TRITON_3_8)
    assert table[0].split() == ["call", "forward", "backward", "launches"]
    assert {line[: host_time.WIDTH].strip() for line in table[1:]} == set(names)
