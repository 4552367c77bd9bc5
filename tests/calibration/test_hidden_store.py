"""A folder goes on where it was, is refused when it is another's or damaged, and never half trusted."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from tide_export.calibration import hidden_store as module
from tide_export.calibration.distributed import Processes
from tide_export.calibration.hidden_store import FolderStore
from tide_export.errors import CalibrationError

RECORD = {"format": 1, "weights_sha256": "abc", "plan_sha256": "def", "layers": [2, 4], "kept": 6, "width": 3}
SLOTS = [np.array([0, 4]), np.array([5]), np.array([1, 2, 3])]
ALONE = Processes(0, 1)


def record(**changed):
    return RECORD | {"batches": len(SLOTS)} | changed


def states(batch):
    return {layers: torch.full((len(SLOTS[batch]), 3), 10.0 * layers + batch) for layers in (2, 4)}


def fill(folder, batches, **changed):
    with FolderStore(folder, record(**changed), ALONE) as store:
        pending = store.pending()
        for batch in batches:
            store.put(batch, SLOTS[batch], states(batch))
    return pending


def finish(folder):
    with FolderStore(folder, record(), ALONE) as store:
        for batch in store.pending():
            store.put(batch, SLOTS[batch], states(batch))
        return store.finish()


def check(found):
    for layers in (2, 4):
        assert found[layers].dtype == torch.float32
        assert found[layers][:, 0].tolist() == [10 * layers + batch for batch in (0, 2, 2, 2, 0, 1)]


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path / "a" / "cache", [1])
    return tmp_path / "a" / "cache"


def test_goes_on_after_the_last_batch(folder):
    assert fill(folder, []) == [0, 2]
    check(finish(folder))
    assert fill(folder, []) == []


def test_an_error_keeps_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_SECONDS", 1e9)
    with FolderStore(tmp_path, record(), ALONE) as store:
        store.put(2, SLOTS[2], states(2))
        assert np.load(tmp_path / "done.npy").tolist() == [0, 0, 0]
        store.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert fill(tmp_path, []) == [0, 1]


def test_a_batch_is_marked_only_after_its_states_are_flushed(tmp_path, monkeypatch):
    order = []
    flush = np.memmap.flush

    def spy(array):
        order.append((Path(array.filename).name, int(np.load(tmp_path / "done.npy").sum())))
        flush(array)

    with FolderStore(tmp_path, record(), ALONE) as store:
        monkeypatch.setattr(np.memmap, "flush", spy)
        monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
        store.put(0, SLOTS[0], states(0))
        monkeypatch.setattr(module, "FLUSH_SECONDS", 1e9)
        store.put(1, SLOTS[1], states(1))
    names = ["states_2.npy", "states_4.npy", "done.npy"]
    assert order == [*zip(names, (0, 0, 1), strict=True), *zip(names, (1, 1, 2), strict=True)]


def test_what_a_caller_writes_stays_out_of_the_files(folder):
    finish(folder)[2].zero_()
    check(finish(folder))


def test_a_temporary_folder_is_gone_while_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with FolderStore(None, record(), ALONE) as store:
        assert not list(tmp_path.iterdir())
        for batch in store.pending():
            store.put(batch, SLOTS[batch], states(batch))
        found = store.finish()
    check(found)


@pytest.mark.parametrize("name", ["weights_sha256", "plan_sha256", "layers", "kept"])
def test_folder_of_another_calibration(folder, name):
    other = {"layers": [2, 5], "kept": 7}.get(name, "other")
    with pytest.raises(CalibrationError, match=rf"belongs to another calibration \(another {name}\): use another") as e:
        fill(folder, [], **{name: other})
    assert str(folder) in str(e.value)
    assert fill(folder, []) == [0, 2]  # untouched, and its lock released


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_damaged_record(folder, content):
    (folder / "plan.json").write_text(content)
    with pytest.raises(CalibrationError, match=r"is damaged \(plan\.json: .*delete it") as caught:
        fill(folder, [])
    assert "\n" not in str(caught.value)


def damage(folder, name, how):
    path = folder / name
    if how == "gone":
        path.unlink()
    elif how == "short":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "no array":
        path.write_bytes(b"garbage")
    elif how == "other shape":
        np.save(path, np.zeros((2, 2), np.float32))
    else:
        np.save(path, np.full(len(SLOTS), 7, np.uint8))


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("states_4.npy", "done.npy") for how in ("gone", "short", "no array", "other shape")]
    + [("done.npy", "no flags")],
)
def test_damaged_files(folder, name, how):
    damage(folder, name, how)
    with pytest.raises(CalibrationError, match=rf"{folder} is damaged \({name}: .*: delete it"):
        fill(folder, [])


def test_files_without_a_record_are_made_anew(folder):
    """A run that was killed while it made them: nothing says that any of it is whole."""
    (folder / "plan.json").unlink()
    (folder / "states_4.npy").unlink()
    assert fill(folder, []) == [0, 1, 2]
    check(finish(folder))


def test_folder_with_something_else_in_it(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(CalibrationError, match=r"holds other files \(thesis\.txt\): use an empty folder"):
        fill(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["thesis.txt"]


def test_process_that_read_another_text(folder, monkeypatch):
    monkeypatch.setattr(Processes, "barrier", lambda self: None)
    with (
        pytest.raises(CalibrationError, match=r"process 1 .* differs from the main one \(another plan_sha256\)"),
        FolderStore(folder, record(plan_sha256="other"), Processes(1, 2)),
    ):
        pytest.fail("it was let in")


def test_folder_in_use(folder):
    with FolderStore(folder, record(), ALONE), pytest.raises(CalibrationError, match="is in use by another run"):
        fill(folder, [])
    assert fill(folder, []) == [0, 2]


def test_path_of_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"cannot write the calibration folder .*file"):
        fill(tmp_path / "file", [])


def test_too_full_a_disk_is_told_before(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 3 << 20))
    fill(tmp_path / "small", [])
    with pytest.raises(CalibrationError, match=r"needs 160\.0 MB but its disk has 3\.1 MB free: .*_tokens_kept"):
        fill(tmp_path / "large", [], kept=20000, width=1000)
    assert not list((tmp_path / "large").glob("*.npy"))


def test_space_is_reserved_and_a_quota_is_an_error(tmp_path, monkeypatch):
    """A sparse file would end the process with a signal when a page of it finds the disk full."""
    fill(tmp_path / "a", [], kept=5000)
    assert (tmp_path / "a" / "states_2.npy").stat().st_blocks * 512 >= 5000 * 3 * 4

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CalibrationError, match=r"cannot write the calibration folder .*/b: no space left"):
        fill(tmp_path / "b", [])
    monkeypatch.undo()
    assert fill(tmp_path / "b", []) == [0, 1, 2]
