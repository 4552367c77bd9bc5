"""Bundles on disk: damage is found and named, and a failed export or replacement leaves what was there."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import fail_with, make_manifest, names_in, tuned, write

from tide_export.bundle import store as bundle_module
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import replace_manifest, write_manifest, writing_bundle
from tide_export.errors import BundleError

# --- opening ---------------------------------------------------------------------------------------------------------


def test_what_is_no_bundle_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        open_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match=r"is not a bundle: it has no tide\.json"):
        open_bundle(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "file")


@pytest.mark.parametrize("verify", [True, False])
def test_missing_truncated_and_longer_files_are_always_found(tmp_path: Path, verify: bool) -> None:
    path = write(tmp_path / "b")
    engine = path / "engines" / "head.engine"
    engine.write_bytes(engine.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"head\.engine' is truncated: 5999 of 6000 bytes"):
        open_bundle(path, verify=verify)
    engine.write_bytes(b"engine" * 1000 + b"!")
    with pytest.raises(BundleError, match=r"head\.engine' has 6001 bytes instead of 6000"):
        open_bundle(path, verify=verify)
    engine.unlink()
    with pytest.raises(BundleError, match=r"head\.engine' is missing"):
        open_bundle(path, verify=verify)
    engine.mkdir()
    with pytest.raises(BundleError, match=r"head\.engine' is not a file"):
        open_bundle(path, verify=verify)


def test_one_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "b")
    content = bytearray((path / "engines" / "head.engine").read_bytes())
    content[3000] ^= 1
    (path / "engines" / "head.engine").write_bytes(content)
    with pytest.raises(BundleError, match=r"head\.engine' is corrupt"):
        open_bundle(path)
    open_bundle(path, verify=False)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_the_bundle_appears_at_the_end_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "parent" / "b"
    with writing_bundle(path) as folder:
        assert not path.exists()
        (folder / "model.onnx").write_bytes(b"graph")
        write_manifest(folder, make_manifest())
        assert not path.exists()
    assert names_in(path) == {"model.onnx", "tide.json"}
    assert names_in(path.parent) == {"b"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_export_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write(tmp_path / "made" / "b", then=fail_with(error))
    assert names_in(tmp_path) == set()


def test_a_failed_export_leaves_the_old_bundle(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    with pytest.raises(RuntimeError):
        write(path, b"new", overwrite=True, then=fail_with(RuntimeError))
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


def test_an_export_that_wrote_no_manifest_fails(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"made no tide\.json"), writing_bundle(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"graph")
    assert names_in(tmp_path) == set()


def test_an_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for output in (path, tmp_path / "file", tmp_path / "link", tmp_path):
        with pytest.raises(BundleError, match="already exists"), writing_bundle(output):
            pytest.fail("the body ran")
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwrite_replaces_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(bundle_module, "_exchange", lambda first, second: False)
    path = write(tmp_path / "b", b"old")
    (path / "extra").write_text("of the old bundle")
    write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"new"
    assert names_in(tmp_path) == {"b"}
    assert "extra" not in names_in(path)


def test_overwrite_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    write(tmp_path / "b", b"old")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    write(tmp_path / "link", b"new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert open_bundle(tmp_path / "b").file("model.onnx").read_bytes() == b"new"


def test_overwrite_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "thesis", tmp_path / "file"):
        with pytest.raises(BundleError, match="is not a bundle"), writing_bundle(output, overwrite=True):
            pytest.fail("the body ran")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_made_during_the_export_survives(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "b"

    def interfere() -> None:
        path.mkdir()
        (path / "chapter.txt").write_text("mine")

    with pytest.raises(BundleError, match="exists"):
        write(path, overwrite=overwrite, then=interfere)
    assert (path / "chapter.txt").read_text() == "mine"
    assert names_in(tmp_path) == {"b"}


def test_when_the_new_bundle_cannot_be_moved_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "b", b"old")
    monkeypatch.setattr(bundle_module, "_exchange", lambda first, second: False)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith("tide-tmp"):
            raise OSError(errno.EIO, "the disk died")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk died"):
        write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="file"), writing_bundle(tmp_path / "file" / "b"):
        pytest.fail("the body ran")


# --- another manifest for a bundle that is there ---------------------------------------------------------------------


def test_a_manifest_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "b")

    def others() -> dict[Path, tuple[int, int, int]]:
        stats = {file: file.stat() for file in path.rglob("*") if file.name != "tide.json"}
        return {file: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}

    before = others()
    mode = (path / "tide.json").stat().st_mode
    opened = open_bundle(path)
    replaced = replace_manifest(opened, tuned(replace(opened.manifest, files={})))
    assert replaced == open_bundle(path)
    assert replaced.manifest == tuned(opened.manifest)
    assert others() == before
    assert (path / "tide.json").stat().st_mode == mode
    assert names_in(tmp_path) == {"b"}


def test_a_manifest_is_replaced_through_a_link(tmp_path: Path) -> None:
    write(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    opened = open_bundle(tmp_path / "link")
    replace_manifest(opened, tuned(opened.manifest))
    assert (tmp_path / "link").is_symlink()
    assert open_bundle(tmp_path / "b").manifest == tuned(opened.manifest)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_when_the_new_manifest_cannot_be_written_the_old_one_stays(tmp_path, monkeypatch, broken) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    text = (tmp_path / "b" / "tide.json").read_bytes()

    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC if broken == "fsync" else errno.EIO, "the disk died")

    with monkeypatch.context() as patch:
        patch.setattr(os if broken == "fsync" else Path, broken, failing)
        says = "no space left" if broken == "fsync" else "stays as it was: the disk died"
        with pytest.raises(BundleError, match=says):
            replace_manifest(opened, tuned(opened.manifest))
    assert (tmp_path / "b" / "tide.json").read_bytes() == text
    assert names_in(tmp_path / "b") == {"model.onnx", "engines", "tide.json"}
    assert names_in(tmp_path) == {"b"}


def test_a_manifest_that_could_not_be_read_back_does_not_replace_one(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    with pytest.raises(BundleError, match="field 'thresholds' must lie in"):
        replace_manifest(opened, replace(opened.manifest, thresholds=(0.5, 2.0)))
    assert open_bundle(tmp_path / "b") == opened


def test_a_bundle_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    write(tmp_path / "b", b"another", overwrite=True)
    with pytest.raises(BundleError, match="was changed by something else meanwhile"):
        replace_manifest(opened, tuned(opened.manifest))
    assert open_bundle(tmp_path / "b").manifest.tuning is None
