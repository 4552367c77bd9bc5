"""A little of everything that the kernels do, for runs under a sanitizer, which are slow.

python tests/plugins/kernel_cases.py LIBRARY          the build for the CPU, with LD_PRELOAD=libasan.so
compute-sanitizer --tool memcheck python tests/plugins/kernel_cases.py LIBRARY --gpu
"""

import sys
from pathlib import Path

from kernel_checks import (
    RouteCase,
    ScatterCase,
    check_compact,
    check_gather,
    check_route,
    check_route_nan,
    check_route_rows_alone,
    check_scatter,
)
from kernel_runner import DeviceMemory, HostMemory, Runner, tk

F, H, B = tk.FLOAT32, tk.FLOAT16, tk.BFLOAT16
RMS, LAYER = tk.NORM_RMS, tk.NORM_LAYER

# Awkward sizes: nothing is a multiple of a tile, a chunk (256) or 16 bytes, and both the path that divides the depth
# and the one that does not (more than 512 rows) are taken, with either tile.
ROUTE = [
    RouteCase(1, 111, 1, states=F),
    RouteCase(1, 300, 19, 2, states=H, weights=H),
    RouteCase(5, 257, 33, 5, states=F, norm=RMS, padding=1),
    RouteCase(17, 515, 70, 19, states=H, weights=F, norm=LAYER, shift=True, row_thresholds=True),
    RouteCase(33, 300, 130, 33, states=B, weights=B, norm=RMS, scale_offset=1.0, padding=8),
    RouteCase(65, 129, 40, 0, states=B, weights=F, norm=LAYER),
    RouteCase(513, 300, 9, 3, states=F, norm=LAYER, shift=True),
    RouteCase(600, 270, 8, 8, states=H, weights=H, norm=RMS, padding=3),
]
SCATTER = [
    ScatterCase(1, 64),
    ScatterCase(19, 111, 5, states=F, norm=LAYER, shift=True, output_rows=11, padding=3),
    ScatterCase(33, 264, 300, states=B, weights=B),
    ScatterCase(40, 100, 16, states=H, weights=F, norm=tk.NORM_NONE),
]


def tolerance(case: RouteCase | ScatterCase) -> float:
    """What may differ from float64. Only 16-bit products are of rounded norms, and only outputs are rounded."""
    if isinstance(case, RouteCase):
        return 4e-3 if case.tensor_cores and case.norm != tk.NORM_NONE else 2e-5
    return {F: 2e-5, H: 5e-3, B: 4e-2}[case.states]


def run_all(runner: Runner) -> int:
    """Runs every case; returns their number."""
    for route in ROUTE:
        check_route(runner, route, tolerance(route))
    for scatter in SCATTER:
        check_scatter(runner, scatter, tolerance(scatter))
    check_route_rows_alone(runner, ROUTE[-1], [1, 33])
    check_route_nan(runner, ROUTE[4])
    for rows, row_bytes in ((0, 4), (1, 6), (1025, 16), (2100, 7)):
        check_compact(runner, rows, row_bytes, 0.4, padding=row_bytes % 2)
    check_gather(runner, 5, 3, 16, 48)
    check_gather(runner, 2, 0, 8, 6)
    check_gather(runner, 4, 9, 8, 12)
    return len(ROUTE) + len(SCATTER) + 9


if __name__ == "__main__":
    memory = DeviceMemory if "--gpu" in sys.argv[2:] else HostMemory
    print(f"{run_all(Runner(Path(sys.argv[1]), memory, guard=0))} cases hold")
