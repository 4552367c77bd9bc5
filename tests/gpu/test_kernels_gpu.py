"""The kernel on a GPU against float64, with guards and NaN around and in everything it writes.

python -m pytest tests/gpu -q          needs numpy, pytest, and cmake with nvcc (or TIDE_KERNELS_LIBRARY)
sh tests/gpu/sanitize.sh               the same code under compute-sanitizer
"""

import ctypes
import sys
from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import LAYER, NONE, RMS, B, ExitCase, F, H, run_all, tolerance
from kernel_checks import ExitResult, check_exit, check_nan, check_slots_alone, exit_args, exit_data, run_exit
from kernel_runner import ROOT, DeviceMemory, Runner, poison, tk

sys.path.append(str(ROOT / "tools" / "benchmarks"))
from switch_graph import SwitchGraph

SLOTS = [1, 3, 8, 17, 64, 333]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    ("hidden", "bottleneck", "rank"), [(64, 1, 4), (111, 19, 0), (1000, 130, 33), (4096, 128, 64), (8192, 512, 256)]
)
@pytest.mark.parametrize("kind", [F, H, B])
def test_exit(runner, slots, hidden, bottleneck, rank, kind):
    norm = (NONE, RMS, LAYER)[(slots + hidden) % 3]
    for shortlist in (0, 256):
        case = ExitCase(slots, hidden, bottleneck, shortlist, rank, kind, norm, norm == LAYER, tokens=1 + hidden % 3)
        check_exit(runner, case, tolerance(case))


@pytest.mark.parametrize("kind", [F, H, B])
def test_a_slot_s_results_do_not_depend_on_the_others(runner, kind):
    check_slots_alone(runner, ExitCase(333, 4096, 128, 256, 64, kind), [1, 3, 4, 5, 64])


@pytest.mark.parametrize("kind", [F, H, B])
def test_the_same_bits_every_time(runner, kind):
    for _ in range(3):
        check_slots_alone(runner, ExitCase(333, 2048, 64, 100, 64, kind), [333])


@pytest.mark.parametrize("kind", [F, H, B])
def test_nan_stays_in_its_slot(runner, kind):
    check_nan(runner, ExitCase(333, 2048, 64, 100, 64, kind))


def test_small_awkward_cases(runner):
    run_all(runner)


def test_addresses_that_allow_no_fours(kernels_library):
    run_all(Runner(kernels_library, DeviceMemory, guard=20))


@pytest.mark.parametrize("lens_rank", [0, 16])
def test_in_a_switch_body(runner, lens_rank):
    """Where the runtime runs it: in the body of a switch node, behind itself, with the counters it has left."""
    case = ExitCase(7, 1024, 64, 32, lens_rank, B)
    memory, data = DeviceMemory(), exit_data(case)
    expected = run_exit(runner, case, data)
    args = exit_args(case)
    for name, array in data.inputs().items():
        setattr(args, name, memory.put(array.reshape(-1).view(np.uint8)))
    args.norm.scale = memory.put(data.norm["scale"].view(np.uint8))
    for name, array in vars(expected).items():
        setattr(args, name, memory.put(np.full(array.nbytes, 255, np.uint8)))
    size = runner.kernels.exit_workspace(args)
    workspace, counters = memory.put(np.full(size, 255, np.uint8)), memory.put(np.zeros(tk.COUNTERS * 4, np.uint8))
    stream = ctypes.c_void_p()
    memory.check(memory.cudart.cudaStreamCreateWithFlags(ctypes.byref(stream), 1))
    calls = 3
    graph = SwitchGraph(
        memory.cudart,
        stream.value,
        lambda: [runner.kernels.exit(args, workspace, size, counters, stream.value) for _ in range(calls)],
    )
    for _ in range(2):
        graph.launch()
    memory.wait()
    for name, array in vars(expected).items():
        assert np.array_equal(memory.get(getattr(args, name), array.nbytes), array.reshape(-1).view(np.uint8)), name
    graph.close()
    memory.check(memory.cudart.cudaStreamDestroy(stream))
    memory.free()


def test_in_a_cuda_graph(runner):
    """Captured twice in a row, replayed on new states: each launch waits for the one before it, whose results it may
    overwrite, and nothing allocates or goes to another stream."""
    case = ExitCase(7, 1024, 64, 32, 16, B)
    memory = DeviceMemory()
    cudart, check = memory.cudart, memory.check
    data = exit_data(case)
    args = exit_args(case)
    for name, array in data.inputs().items():
        setattr(args, name, memory.put(array.reshape(-1).view(np.uint8)))
    args.norm.scale = memory.put(data.norm["scale"].view(np.uint8))
    empty = ExitResult(poison((7,), np.float32), poison((7,), np.int32), poison((7, 2, 1024), np.uint16))
    for name, array in vars(empty).items():
        setattr(args, name, memory.put(array.reshape(-1).view(np.uint8)))
    size = runner.kernels.exit_workspace(args)
    workspace, counters = memory.put(np.full(size, 255, np.uint8)), memory.put(np.zeros(tk.COUNTERS * 4, np.uint8))

    stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cudart.cudaStreamCreateWithFlags(ctypes.byref(stream), 1))  # does not wait for the default stream
    runner.kernels.exit(args, workspace, size, counters, stream.value)  # CUDA loads kernels at their first launch
    check(cudart.cudaStreamSynchronize(stream))
    check(cudart.cudaStreamBeginCapture(stream, 0))
    runner.kernels.exit(args, workspace, size, counters, stream.value)
    runner.kernels.exit(args, workspace, size, counters, stream.value)
    check(cudart.cudaStreamEndCapture(stream, ctypes.byref(graph)))
    check(cudart.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    for seed in (1, 2):
        data.states = exit_data(replace(case, seed=seed)).states
        memory.copy(args.states, data.states.ctypes.data, data.states.nbytes, memory.TO_DEVICE)
        memory.copy(args.exit_states, empty.exit_states.ctypes.data, empty.exit_states.nbytes, memory.TO_DEVICE)
        check(cudart.cudaGraphLaunch(executable, stream))
        memory.wait()
        expected = run_exit(runner, case, data)
        for name, array in vars(expected).items():
            assert np.array_equal(memory.get(getattr(args, name), array.nbytes), array.reshape(-1).view(np.uint8)), name
    check(cudart.cudaGraphExecDestroy(executable))
    check(cudart.cudaGraphDestroy(graph))
    check(cudart.cudaStreamDestroy(stream))
    memory.free()
