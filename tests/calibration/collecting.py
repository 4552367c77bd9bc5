"""Not a test: what `test_distributed` and `test_state_store` start in other processes, to share work or be killed.

    python collecting.py OUT [FOLDER [DIE_AT [RANK]]]

Collects from the demo model and writes the sample to OUT/<rank>.npz; with DIE_AT the process RANK kills itself before
its batch with that number (from 0).
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from tide_export.calibration import state_store as store
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.distributed import Processes
from tide_export.data.sequences import TokenSequence
from tide_export.model.source import load_model

LAYERS = (3, 9, 12)


def some_text(number: int = 40) -> list[TokenSequence]:
    rng = np.random.default_rng(7)
    lengths = rng.integers(4, 48, number)
    return [TokenSequence(n // 3, rng.integers(0, 4096, size).astype(np.int32)) for n, size in enumerate(lengths)]


def sample_of(source, folder: Path | None = None):
    return collect(source, some_text(), LAYERS, TideConfig(calibration_batch=3), 300, "collecting", folder)


def arrays(sample) -> dict[str, np.ndarray]:
    raw = {f"raw_{layers}": state.numpy() for layers, state in sample.raw.items()}
    return raw | {name: getattr(sample, name).numpy() for name in ("next_ids", "documents", "locations")}


def main() -> None:
    out, folder, die_at, rank, *_ = [*sys.argv[1:], "", "", "0"]
    store.FLUSH_SECONDS = 0.0  # so that a batch is kept as soon as it was run
    source = load_model(Path(__file__).parents[2] / "demo" / "demo-llama")
    processes = Processes.current()
    put, calls = store.FolderStore.put, [0]

    def die(self, *args):
        if calls[0] == int(die_at) and processes.rank == int(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        put(self, *args)

    if die_at:
        store.FolderStore.put = die
    sample = sample_of(source, Path(folder) if folder else None)
    np.savez(Path(out) / f"{processes.rank}.npz", **arrays(sample))


if __name__ == "__main__":
    main()
