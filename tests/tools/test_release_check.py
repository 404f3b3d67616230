"""The release's checklist sees what is missing."""

import zipfile

import pytest

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


def test_symbols_are_those_of_the_string_table():
    found = release_check.symbols(b"\0GLIBC_2.14\0GLIBCXX_3.4.30\0GLIBC_2.32\0exp\0xGLIBC_9.9\0")
    assert found == {"GLIBC": {"2.14", "2.32"}, "GLIBCXX": {"3.4.30"}}


@pytest.mark.parametrize("version, fine", [("2.14", True), ("2.32", False)])
def test_a_library_newer_than_the_policy(tmp_path, version, fine):
    path = wheel(tmp_path, **{"fastkd/_C.abi3.so": f"\0GLIBC_{version}\0".encode()})
    assert findings(release_check.linux(path, {"GLIBC": ["2.14"]})) == {release_check.POLICY: fine}


def test_texts_name_what_is_left_to_do():
    found = {name: detail for name, _, detail in release_check.texts()}
    assert found.keys() == {"version", "changelog", "tag", "tree"}
    assert findings(release_check.texts())["version"]
