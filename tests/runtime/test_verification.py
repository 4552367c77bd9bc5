"""When the files of a bundle are hashed, and when a large one that was is not hashed again."""

import os
import shutil
from pathlib import Path

import pytest

from tide_export import names
from tide_export.bundle import verification
from tide_export.bundle.opened import BundleFile, open_bundle
from tide_export.bundle.verification import verifying
from tide_export.errors import BundleError
from tide_export.runtime.engine import load

CORRUPT = "is corrupt: its sha256 is not the manifest's"


@pytest.fixture
def bundle(wide_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy whose weights count as large, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verification, "LARGE", (wide_bundle / names.WEIGHTS_FILE).stat().st_size)
    return Path(shutil.copytree(wide_bundle, tmp_path / "bundle"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed."""
    found: list[str] = []
    sha256 = BundleFile._sha256
    monkeypatch.setattr(BundleFile, "_sha256", lambda file: found.append(file.path.name) or sha256(file))
    return found


def damage(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))


def test_weights_are_hashed_once(bundle: Path, hashed: list[str]) -> None:
    load(bundle, threads=1)
    assert set(hashed) == {name.rpartition("/")[2] for name in open_bundle(bundle, verify=False).files}
    hashed.clear()
    load(bundle, threads=1)
    assert names.WEIGHTS_FILE not in hashed
    assert names.GRAPH_FILE in hashed


def test_a_file_that_was_touched_is_hashed_again(bundle: Path, hashed: list[str]) -> None:
    load(bundle, threads=1)
    file = bundle / names.WEIGHTS_FILE
    before = file.stat()
    damage(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # all but the time of change is as before
    with pytest.raises(BundleError, match=f"{names.WEIGHTS_FILE}' {CORRUPT}"):
        load(bundle, threads=1)
    with pytest.raises(BundleError, match=CORRUPT):  # and is not remembered
        load(bundle, threads=1)
    damage(file)
    load(bundle, threads=1)
    copy = shutil.copytree(bundle, bundle.with_name("copy"))
    hashed.clear()
    load(copy, threads=1)
    assert names.WEIGHTS_FILE in hashed, "another file"


def test_a_corrupt_file_is_named_rather_than_what_it_caused(bundle: Path) -> None:
    opened = open_bundle(bundle)
    damage(bundle / names.WEIGHTS_FILE)
    with pytest.raises(BundleError, match=f"{names.WEIGHTS_FILE}' {CORRUPT}"), verifying(opened):
        raise BundleError("it does not load")
    damage(bundle / names.WEIGHTS_FILE)
    damage(bundle / names.GRAPH_FILE)
    with pytest.raises(BundleError, match=f"{names.GRAPH_FILE}' {CORRUPT}"), verifying(opened):
        pytest.fail("a graph is hashed before it is read")


@pytest.mark.parametrize("home", [False, True])
def test_without_a_cache_files_are_hashed_each_time(
    bundle: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: bool
) -> None:
    if home:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    for _ in range(2):
        hashed.clear()
        load(bundle, threads=1)
        assert names.WEIGHTS_FILE in hashed


def test_inspecting_hashes_everything(bundle: Path, hashed: list[str]) -> None:
    load(bundle, threads=1)
    hashed.clear()
    open_bundle(bundle)
    assert names.WEIGHTS_FILE in hashed
