"""A little of everything that the kernel does, for runs under a sanitizer, which are slow.

python tests/plugins/kernel_cases.py LIBRARY          the build for the CPU, with LD_PRELOAD=libasan.so
compute-sanitizer --tool memcheck python tests/plugins/kernel_cases.py LIBRARY --gpu
"""

import sys
from pathlib import Path

from kernel_checks import ExitCase, check_exit, check_nan, check_slots_alone
from kernel_runner import DeviceMemory, HostMemory, Runner, tk

F, H, B = tk.FLOAT32, tk.FLOAT16, tk.BFLOAT16
NONE, RMS, LAYER = tk.NORM_NONE, tk.NORM_RMS, tk.NORM_LAYER

# Awkward sizes: little is a multiple of a block's share of the channels, of a tile (128) or of four; there are more
# slots than the teams of a launch without clusters take at once (16).
CASES = [
    ExitCase(1, 111, 1),
    ExitCase(1, 300, 19, 2, kind=H, tokens=3),
    ExitCase(5, 257, 33, 5, 7, norm=LAYER, exit_rows=1),
    ExitCase(4, 64, 16, 8, 4, kind=B, norm=NONE),
    ExitCase(17, 515, 70, 19, 130, kind=H, norm=LAYER, shift=True, tokens=2),
    ExitCase(3, 520, 128, 132, 12, kind=B, exit_rows=4),
    ExitCase(2, 8, 3, 3, 1, norm=RMS),
]


def tolerance(case: ExitCase) -> float:
    """What may differ from float64: 16-bit states may be rounded to the other side."""
    return {F: 2e-5, H: 3e-3, B: 2e-2}[case.kind]


def run_cases(runner: Runner) -> None:
    for case in CASES:
        check_exit(runner, case, tolerance(case))


def run_all(runner: Runner) -> int:
    """Runs every case, and what is asked of slots; returns the number of checks."""
    run_cases(runner)
    check_slots_alone(runner, CASES[4], [1, 5])
    check_nan(runner, CASES[2])
    return len(CASES) + 2


if __name__ == "__main__":
    memory = DeviceMemory if "--gpu" in sys.argv[2:] else HostMemory
    print(f"{run_all(Runner(Path(sys.argv[1]), memory, guard=0))} cases hold")
