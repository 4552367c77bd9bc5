"""The kernels on a GPU against float64, with guards and NaN around and in everything they write.

python -m pytest tests/gpu -q          needs numpy, pytest, and cmake with nvcc (or TIDE_KERNELS_LIBRARY)
sh tests/gpu/sanitize.sh               the same code under compute-sanitizer
"""

import ctypes

import numpy as np
import pytest
from kernel_cases import LAYER, RMS, B, F, H, RouteCase, run_all, tolerance
from kernel_checks import (
    ScatterCase,
    check_compact,
    check_gather,
    check_route,
    check_route_nan,
    check_route_rows_alone,
    check_scatter,
    route_data,
    route_reference,
)
from kernel_runner import DeviceMemory, Runner, tk

NONE = tk.NORM_NONE
ROWS = [1, 19, 32, 33, 111, 989, 4096]


def on_gpu(case) -> float:
    """Tensor cores add products in an order and with roundings of their own."""
    return max(tolerance(case), 1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("hidden", "bottleneck"), [(64, 1), (111, 19), (1000, 130), (4096, 128), (8192, 512)])
@pytest.mark.parametrize(("states", "weights"), [(F, F), (H, H), (B, B), (H, F), (B, F)])
def test_route(runner, rows, hidden, bottleneck, states, weights):
    norm = (NONE, RMS, LAYER)[(rows + hidden) % 3]
    for shortlist in (0, 256):
        case = RouteCase(rows, hidden, bottleneck, shortlist, states, weights, norm, norm == LAYER, padding=hidden % 3)
        check_route(runner, case, on_gpu(case))


@pytest.mark.parametrize("kind", [F, H, B])
def test_a_row_s_score_does_not_depend_on_the_others(runner, kind):
    case = RouteCase(1200, 4096, 128, 256, states=kind, weights=kind, norm=RMS)
    check_route_rows_alone(runner, case, [1, 4, 16, 17, 32, 33, 512, 513])


@pytest.mark.parametrize("kind", [F, H, B])
def test_the_same_bits_every_time(runner, kind):
    case = RouteCase(333, 2048, 64, 100, states=kind, weights=kind)
    for _ in range(3):
        check_route_rows_alone(runner, case, [333])


@pytest.mark.parametrize("kind", [F, H, B])
def test_nan_stays_in_its_row(runner, kind):
    check_route_nan(runner, RouteCase(333, 2048, 64, 100, states=kind, weights=kind, norm=RMS))


def test_small_awkward_cases(runner):
    run_all(runner)


def test_addresses_that_allow_no_packs(kernels_library):
    run_all(Runner(kernels_library, DeviceMemory, guard=24))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "weights"), [(F, F), (H, H), (B, B), (H, F), (B, F)])
def test_exit_scatter(runner, rows, kind, weights):
    for hidden, rank, norm in ((64, 0, NONE), (111, 5, RMS), (4096, 64, LAYER), (8192, 0, RMS)):
        case = ScatterCase(rows, hidden, rank, kind, weights, norm, shift=norm == LAYER, padding=hidden % 2)
        check_scatter(runner, case, on_gpu(case))


@pytest.mark.parametrize("rows", [0, *ROWS, 1_000_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_compact(runner, rows, share):
    for row_bytes in (2, 30, 128 if rows > 10_000 else 8192):
        check_compact(runner, rows, row_bytes, share, padding=row_bytes % 4)


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity"), [(1, 1, 8), (5, 3, 16), (64, 1, 32), (33, 2, 3000), (4, 9, 8)]
)
def test_gather_pending(runner, batch, tokens, capacity):
    for token_bytes in (2, 12, 512):
        check_gather(runner, batch, tokens, capacity, token_bytes)


def test_route_in_a_cuda_graph(runner):
    """Captured once, replayed on new states: nothing allocates, nothing waits, nothing goes to another stream."""
    case = RouteCase(7, 1024, 64, 32, states=B, weights=B, norm=RMS)
    memory = DeviceMemory()
    cudart, check = memory.cudart, memory.check
    data = route_data(case)
    args = tk.RouteArgs(states_type=B, weights_type=B, rows=7, hidden=1024, bottleneck=64, shortlist=32)
    args.states_stride, args.norm.kind, args.norm.epsilon = 1024, RMS, 1e-5
    for name, array in {"states": data.states, "threshold": data.threshold, **data.weights}.items():
        setattr(args, name, memory.put(array.reshape(-1).view(np.uint8)))
    args.norm.scale = memory.put(data.norm["scale"].view(np.uint8))
    args.scores, args.exits = memory.put(np.full(28, 255, np.uint8)), memory.put(np.full(28, 255, np.uint8))
    size = runner.kernels.workspace("tide_route", args)
    workspace = memory.put(np.full(size, 255, np.uint8))

    stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cudart.cudaStreamCreateWithFlags(ctypes.byref(stream), 1))  # does not wait for the default stream
    runner.kernels.start("tide_route", args, workspace, size, stream.value)  # CUDA loads kernels at their first launch
    check(cudart.cudaStreamSynchronize(stream))
    check(cudart.cudaStreamBeginCapture(stream, 0))
    runner.kernels.start("tide_route", args, workspace, size, stream.value)
    check(cudart.cudaStreamEndCapture(stream, ctypes.byref(graph)))
    check(cudart.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    for seed in (1, 2):
        new = route_data(RouteCase(**{**vars(case), "seed": seed}))
        data.states = new.states
        memory._copy(args.states, new.states.ctypes.data, new.states.nbytes, memory.TO_DEVICE)
        check(cudart.cudaGraphLaunch(executable, stream))
        memory.wait()
        scores = memory.get(args.scores, 28).view(np.float32)
        np.testing.assert_allclose(scores, route_reference(case, data, 1e-5), atol=on_gpu(case))
    check(cudart.cudaGraphExecDestroy(executable))
    check(cudart.cudaGraphDestroy(graph))
    check(cudart.cudaStreamDestroy(stream))
    memory.free()
