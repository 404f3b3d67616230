"""The release's checklist finds what is missing."""

import zipfile

from tools import release_check


def wheel(folder, **files: bytes):
    path = folder / "fastkd-0.1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in release_check.IN_WHEEL - files.keys():
            archive.writestr(name, b"")
        archive.writestr("fastkd-0.1.0.dist-info/licenses/LICENSE", b"")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def findings(part) -> dict[str, bool]:
    return {name: fine for name, fine, _ in part}


def test_contents_and_size(tmp_path, monkeypatch):
    assert all(findings(release_check.contents(None, wheel(tmp_path))).values())
    odd = wheel(tmp_path, **{"tests/test_x.py": b""})
    assert findings(release_check.contents(None, odd))["wheel contents"] is False
    monkeypatch.setattr(release_check, "MOST_BYTES", 100)
    assert findings(release_check.contents(None, wheel(tmp_path)))["wheel size"] is False
    monkeypatch.setattr(release_check, "IN_WHEEL", {"fastkd/missing.py"})
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("LICENSE", b"")
    assert findings(release_check.contents(None, path))["wheel contents"] is False


def test_texts_name_what_is_left_to_do():
    found = {name: detail for name, _, detail in release_check.texts()}
    assert found.keys() == {"version", "changelog", "tag", "tree"}
    assert findings(release_check.texts())["version"]
