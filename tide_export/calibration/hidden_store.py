"""Stores the raw hidden states that `collect` keeps, in memory or in memory-mapped files.

The folder of a `FolderStore` holds `states_<layers>.npy` (float32 [n, D] each), `done.npy` (a byte per batch of the
plan) and `plan.json` (identifies the calibration). Batches are marked done after their hidden states are on disk, so a
killed run can resume. Several processes can write at once: each byte and row has one writer.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_export.calibration.distributed import Processes
from tide_export.common.files import failure, lock
from tide_export.common.formatting import size
from tide_export.common.values import parse_json
from tide_export.errors import CalibrationError

FLUSH_SECONDS = 5.0  # a killed run loses at most the work since the last flush, which takes milliseconds
RECORD_FILE = "plan.json"
DONE_FILE = "done.npy"
LOCK_FILE = "lock"


class Store:
    """Holds the hidden states of n tokens after each of `layers` layers in memory, filled batch by batch."""

    def __init__(self, layers: Sequence[int], kept: int, width: int, batches: int):
        self.arrays: dict[int, Any] = {count: np.empty((kept, width), np.float32) for count in layers}
        self.done: Any = np.zeros(batches, np.uint8)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def pending(self) -> list[int]:
        """Returns the numbers of the batches that are not done."""
        return np.flatnonzero(self.done == 0).tolist()

    def put(self, batch: int, slots: np.ndarray, hidden: dict[int, torch.Tensor]) -> None:
        """Stores the results of `batch`: layer count -> hidden states [k, D] for the rows `slots` [k]."""
        for count, one in hidden.items():
            self.arrays[count][slots] = one.numpy()
        self.done[batch] = 1

    def finish(self) -> dict[int, torch.Tensor]:
        """Returns all hidden states once every batch is done."""
        return {count: torch.from_numpy(array) for count, array in self.arrays.items()}


class FolderStore(Store):
    """Holds the hidden states in a folder that all processes share; as a context manager, locks it.

    With `folder` None the folder is temporary and unlinked as soon as every process has opened its files: the space is
    freed with the arrays, even if a process is killed.

    Raises:
        CalibrationError: on entry: the folder belongs to another calibration, is damaged, is in use or cannot be
            written, its disk is too full, or the processes have different arguments.
    """

    def __init__(self, folder: Path | None, record: dict[str, Any], processes: Processes):
        self.folder = folder
        self.record = json.loads(json.dumps(record))  # comparable with what is read back
        self.processes = processes
        self._temporary = folder is None
        self._unmarked: list[int] = []
        self._flushed = time.monotonic()
        self._lock: int | None = None

    def __enter__(self) -> "FolderStore":
        try:
            self.folder = Path(self._shared_path())
            if self.processes.main:
                self._prepare(self.folder)
            self.processes.barrier()
            self._check_record(self.folder)
            self.arrays, self.done = self._open(self.folder, "r+")
            self._pending = super().pending()
            self.processes.barrier()  # no process marks a batch before all have read the pending ones
        except OSError as error:
            self._unlock()
            reason = failure(error, Path(self.folder or tempfile.gettempdir()))
            raise CalibrationError(f"cannot write the calibration folder {self.folder}: {reason}") from error
        except CalibrationError:
            self._unlock()
            raise
        finally:
            if self._temporary and self.processes.main and self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
        finally:
            self._unlock()

    def pending(self) -> list[int]:
        """Returns the numbers of the batches not done when the folder was opened, equal in every process."""
        return self._pending

    def put(self, batch: int, slots: np.ndarray, hidden: dict[int, torch.Tensor]) -> None:
        """Stores the results of `batch`, which is marked done at the next flush."""
        for count, one in hidden.items():
            self.arrays[count][slots] = one.numpy()
        self._unmarked.append(batch)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def finish(self) -> dict[int, torch.Tensor]:
        """Returns all hidden states once every process has finished.

        Raises:
            CalibrationError: a process ended early, or the folder was changed.
        """
        self._flush()
        self.processes.barrier()
        if not self.done.all():
            raise CalibrationError(f"calibration folder {self.folder} lacks batches though all is done")
        if not self._temporary and self.folder is not None:
            self.arrays, _ = self._open(self.folder, "c")  # copy on write: callers cannot change the files
        return super().finish()

    def _flush(self) -> None:
        """Writes the hidden states before the marks, so that a mark on the disk implies them."""
        if self._unmarked:
            for array in self.arrays.values():
                array.flush()
            self.done[self._unmarked] = 1
            self.done.flush()
            self._unmarked.clear()
        self._flushed = time.monotonic()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _shared_path(self) -> str:
        """Returns the folder, or a new temporary one of the main process."""
        if self.folder is not None:
            return str(self.folder)
        return self.processes.from_main(lambda: tempfile.mkdtemp(prefix="tide-calibration-"))

    def _prepare(self, folder: Path) -> None:
        """Creates the files, or checks that existing ones belong to this calibration."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        if (folder / RECORD_FILE).exists():
            self._check_record(folder)
            return
        # Without a record, our files are from a run that was killed in this function.
        foreign = {path.name for path in folder.iterdir()} - {*self._files(), LOCK_FILE, RECORD_FILE + ".part"}
        if foreign:
            raise CalibrationError(
                f"calibration folder {folder} holds other files ({min(foreign)}): use an empty folder"
            )
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in self._files().items()}
        free = shutil.disk_usage(folder).free
        if sum(sizes.values()) > free:
            raise CalibrationError(
                f"calibration folder {folder} needs {size(sum(sizes.values()))} but its disk has {size(free)} free: "
                "use a folder on another disk, or keep fewer tokens (calibration_tokens_kept)"
            )
        for name, (shape, dtype) in self._files().items():
            array = np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=shape)
            array.flush()
            with (folder / name).open("r+b") as file:
                # Without reserved space, writing a mapped page on a full disk kills the process.
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
                os.fsync(file.fileno())
        part = folder / (RECORD_FILE + ".part")
        with part.open("w") as file:
            json.dump(self.record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / RECORD_FILE)

    def _check_record(self, folder: Path) -> None:
        try:
            stored = parse_json((folder / RECORD_FILE).read_text())
            if not isinstance(stored, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise CalibrationError(
                f"calibration folder {folder} is damaged ({RECORD_FILE}: {error}): delete it or use another"
            ) from error
        if stored != self.record:
            keys = sorted(key for key in stored.keys() | self.record.keys() if stored.get(key) != self.record.get(key))
            if not self.processes.main:  # the main process has just written or accepted the record
                raise CalibrationError(
                    f"process {self.processes.rank} of this calibration differs from the main one "
                    f"(another {', '.join(keys)}): they must be given the same model, text and options"
                )
            raise CalibrationError(
                f"calibration folder {folder} belongs to another calibration (another {', '.join(keys)}): "
                "use another folder or delete it"
            )

    def _files(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Returns the shape and type of each array file."""
        hidden = (self.record["kept"], self.record["width"])
        files = {f"states_{count}.npy": (hidden, np.dtype(np.float32)) for count in self.record["layers"]}
        return files | {DONE_FILE: ((self.record["batches"],), np.dtype(np.uint8))}

    def _open(self, folder: Path, mode: Any) -> tuple[dict[int, Any], Any]:
        arrays: dict[str, np.ndarray] = {}
        for name, (shape, dtype) in self._files().items():
            try:
                np.load(folder / name, mmap_mode="r")  # raises for a short file, which a writable mapping extends
                array = arrays[name] = np.load(folder / name, mmap_mode=mode)
                if (array.shape, array.dtype) != (shape, dtype):
                    raise ValueError(f"{array.dtype} {array.shape} instead of {dtype} {shape}")
                if name == DONE_FILE and array.max() > 1:
                    raise ValueError("neither 0 nor 1")
            except (ValueError, EOFError, FileNotFoundError) as error:
                raise CalibrationError(
                    f"calibration folder {folder} is damaged ({name}: {error}): delete it or use another"
                ) from error
        done = arrays.pop(DONE_FILE)
        return dict(zip(self.record["layers"], arrays.values(), strict=True)), done


def _locked(folder: Path) -> int:
    """Locks the folder until the returned file descriptor is closed or the process ends."""
    held = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        lock(held, f"calibration folder {folder}", CalibrationError)
    except BaseException:
        os.close(held)
        raise
    return held
