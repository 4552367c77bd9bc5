"""Which of several processes this one is, and how they wait for each other: part of `collect`.

`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N` start N processes that all do the
same, on machines without a GPU too (accelerate's `--cpu` starts one, whatever N, unless MPI does it); `collect` deals
the batches of its plan among them. Only small messages go between them, over gloo on the CPU wherever the model itself
runs, so processes may share a GPU. Without a launcher a process is alone and nothing of accelerate is imported here.

If a process dies, the launcher stops the others, and the connection that breaks ends their waiting even without it. If
one hangs, the others give up after `TIMEOUT`.
"""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

from tide_export.errors import CalibrationError, one_line

# Work is dealt evenly, so the first to finish waits for the last as long as their speeds differ, not for all the work.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """This process among `count`; `rank` counts from 0."""

    rank: int
    count: int

    @classmethod
    def current(cls) -> "Processes":
        """Finds what the launcher said, and joins the other processes on the first call.

        Raises:
            CalibrationError: the processes are on several machines, or do not find each other.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 or "LOCAL_RANK" not in os.environ:  # a cluster's scheduler may set the first alone
            return cls(0, 1)
        if int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
            raise CalibrationError(
                f"{count} processes on several machines: calibration shares memory-mapped files, "
                "so launch all its processes on one"
            )
        state = _attempt(_join, "the processes of this calibration do not find each other")
        return cls(state.process_index, state.num_processes)

    @property
    def main(self) -> bool:
        """Whether this process goes on alone after the work that is shared."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all the others.

        Raises:
            CalibrationError: one of them ended, or did not come within `TIMEOUT`.
        """
        if self.count > 1:
            import torch

            _attempt(torch.distributed.barrier, "another process of this calibration ended or hangs")

    def from_main(self, value: str | None) -> str | None:
        """`value` of the main process, in every process.

        Raises:
            CalibrationError: as `barrier`.
        """
        if self.count == 1:
            return value
        import torch

        values = [value]
        _attempt(
            lambda: torch.distributed.broadcast_object_list(values, src=0),
            "another process of this calibration ended or hangs",
        )
        return values[0]


@cache
def _join():
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=TIMEOUT)  # cpu: gloo, whatever devices the model is on
    atexit.register(state.destroy_process_group)
    return state


def _attempt(action: Callable, problem: str):
    try:
        return action()
    except (RuntimeError, ValueError) as error:  # of gloo and the store that processes meet in
        raise CalibrationError(f"{problem}: {one_line(error)}") from error
