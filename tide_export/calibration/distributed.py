"""Synchronizes the processes of a launcher, which share the work of `collect` and of training.

`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N` start N equal processes, also without
a GPU (accelerate's `--cpu` starts one, whatever N, except with MPI); `collect` distributes its batches among them. They
exchange small messages over gloo on the CPU, so they may share a GPU. Without a launcher there is one process and
accelerate is not imported.

If a process dies, the launcher stops the others, or the broken connection ends their wait. If one hangs, the others
give up after `TIMEOUT`.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from tide_export.common.progress import stage
from tide_export.errors import CalibrationError, one_line

# Work is distributed evenly, so the wait for the slowest process is the difference of their speeds.
TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The rank of this process, from 0, and the number of processes."""

    rank: int
    count: int

    @classmethod
    def current(cls) -> "Processes":
        """Reads the launcher's environment and, on the first call, joins the other processes.

        Raises:
            CalibrationError: the processes are on several machines, or cannot connect.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 or "LOCAL_RANK" not in os.environ:  # a cluster's scheduler may set only WORLD_SIZE
            return cls(0, 1)
        if int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
            raise CalibrationError(
                f"{count} processes on several machines: calibration and adapt share files, so launch all on one"
            )
        state = _attempt(_join, "the processes of this run do not find each other, start all on one machine")
        return cls(state.process_index, state.num_processes)

    @property
    def main(self) -> bool:
        """Whether this process continues alone after the shared work."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all other processes.

        Raises:
            CalibrationError: one of them ended, or did not arrive within `TIMEOUT`.
        """
        if self.count > 1:
            import torch

            _attempt(torch.distributed.barrier, "another process of this run ended or hangs, see its output")

    def from_main(self, compute: Callable[[], str]) -> str:
        """Calls `compute` in the main process and returns its result in every process.

        Raises:
            CalibrationError: another process ended, or did not arrive within `TIMEOUT`.
        """
        values = [compute() if self.main else ""]
        if self.count == 1:
            return values[0]
        import torch

        _attempt(
            lambda: torch.distributed.broadcast_object_list(values, src=0),
            "another process of this run ended or hangs, see its output",
        )
        return values[0]

    @contextmanager
    def stage(self, title: str, total: float) -> Iterator[Callable[[float], Any]]:
        """Shows the main process's progress for all processes, by `common.progress.stage`."""
        if self.main:
            with stage(title, total=total) as advance:
                yield advance
        else:
            yield lambda amount: None

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes by rank; they are pickled.

        Raises:
            CalibrationError: another process ended, or did not arrive within `TIMEOUT`.
        """
        values: list[Any] = [value] * self.count
        if self.count > 1:
            import torch

            _attempt(
                lambda: torch.distributed.all_gather_object(values, value),
                "another process of this run ended or hangs, see its output",
            )
        return values


@cache
def _join():
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=TIMEOUT)  # cpu: gloo, whatever devices the model is on
    atexit.register(state.destroy_process_group)
    return state


def _attempt(action: Callable, problem: str):
    try:
        return action()
    except (RuntimeError, ValueError) as error:  # raised by gloo and torch's store
        raise CalibrationError(f"{problem}: {one_line(error)}") from error
