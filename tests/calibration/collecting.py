"""Not a test: what `test_distributed` starts, two processes that share the work of collecting, one of which dies.

    python collecting.py OUT FOLDER DIE_AT RANK

Loads PyTorch and the demo model once, and forks a process for each rank, as a launcher starts them. Each would write
its sample to OUT/<rank>.npz; the process RANK kills itself before its batch number DIE_AT. Prints how they ended.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401  (once, and not in each process)
import numpy as np

from tide_export.calibration import hidden_store as store
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
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
    out, folder, die_at, dying = sys.argv[1:]
    store.FLUSH_SECONDS = 0.0  # so that a batch is kept as soon as it was run
    source = load_model(Path(__file__).parents[2] / "demo" / "demo-llama")
    started = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            run(source, rank, Path(out), Path(folder), int(die_at) if rank == int(dying) else None)
        started.append(process)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]))


def run(source, rank: int, out: Path, folder: Path, die_at: int | None) -> None:
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        put, calls = store.FolderStore.put, [0]

        def die(self, *args):
            if calls[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            put(self, *args)

        store.FolderStore.put = die
        np.savez(out / f"{rank}.npz", **arrays(sample_of(source, folder)))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
