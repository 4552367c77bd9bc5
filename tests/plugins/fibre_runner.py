"""Runs the kernels that are compiled for the CPU, each of their threads a fibre (`fibres/`)."""

import ctypes
import json
import re
import subprocess
from pathlib import Path

import numpy as np
from kernel_runner import GUARD, Runner, tk

RESIDENT = 64  # blocks that the emulated GPU takes at a time


class FibreError(Exception):
    """A race, a barrier that not all reach, a misuse of memory; with the lines of the sources."""


class FibreRunner(Runner):
    """Kernels of one library on an emulated GPU."""

    def __init__(self, library: Path, guard: int = GUARD) -> None:
        super().__init__(library, guard=guard)
        self.library = library
        self.loaded = self.kernels.loaded
        self.loaded.fibres_problem.restype = self.loaded.fibres_launches.restype = ctypes.c_char_p
        self.loaded.fibres_delete.argtypes = self.loaded.fibres_set_resident.argtypes = [ctypes.c_int]

    def emulate(self, order: int = 0, resident: int = RESIDENT) -> None:
        """Sets the order of threads and blocks (0 is ascending, else a seed), and how many blocks run at a time."""
        self.kernels.emulate(order)
        self.loaded.fibres_set_resident(resident)

    def without(self, barrier: int) -> None:
        """Deletes a barrier of `kernel_barriers`; 0, none."""
        self.loaded.fibres_delete(barrier)

    def launches(self) -> list[dict[str, int]]:
        """What was launched since the last call."""
        return list(json.loads(self.loaded.fibres_launches()))

    def run(
        self,
        args: tk.ExitArgs,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        norm: dict[str, np.ndarray] | None = None,
    ) -> None:
        """As `Runner.run`.

        Raises:
            FibreError: the launch failed as it ran.
        """
        try:
            super().run(args, inputs, outputs, norm)
        except tk.KernelError:
            if problem := self.loaded.fibres_problem().decode():
                raise FibreError(located(self.library, problem)) from None
            raise


def located(library: Path, problem: str) -> str:
    """The problem with lines of the sources for offsets in the library."""
    for offset in set(re.findall(r"\+(0x[0-9a-f]+)", problem)):
        command = ["addr2line", "-i", "-e", str(library), offset]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        calls = [Path(line).name for line in lines if re.search(r"\.cuh?:\d+$", line)]
        problem = problem.replace(f"+{offset}", " < ".join(calls) or offset)
    return problem
