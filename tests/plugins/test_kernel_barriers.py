"""The kernel has every barrier, fence and counter that it needs, and no others: each is deleted in turn, and missed.

Every access to memory is observed: a race is one that nothing orders after another thread's, in whatever order the
threads run (`fibres/races.cpp`).
"""

import ctypes
import shutil

import kernel_barriers
import numpy as np
import pytest
import tiers
from fibre_runner import FibreError, FibreRunner
from kernel_cases import LAYER, ExitCase, run_all, run_cases, tolerance
from kernel_checks import check_exit
from native_builds import Builds, need

# Everything, in tiles, and two groups of slots; a lens whose second matmul takes its rows in two parts.
CASES = [ExitCase(5, 72, 130, 5, 3, norm=LAYER), ExitCase(3, 136, 9, 2, 130)]
RESIDENT = [64, 3]  # blocks at a time


@pytest.fixture(scope="module")
def runner(builds: Builds) -> FibreRunner:
    need(shutil.which("g++") is not None, "there is no g++")
    return FibreRunner(kernel_barriers.build(builds))


def outcome(runner: FibreRunner, barrier: int) -> str:
    """What goes wrong without a barrier; nothing, if nothing does."""
    runner.without(barrier)
    try:
        for number, resident in enumerate(RESIDENT, start=1):
            for case in CASES:
                runner.emulate(barrier + number, resident)
                check_exit(runner, case, tolerance(case))
    except FibreError as problem:
        return str(problem)
    except AssertionError:
        return "a wrong result"
    finally:
        runner.without(0)
    return ""


@pytest.mark.parametrize("resident", RESIDENT)
def test_no_race(runner, resident):
    runner.emulate(7, resident)
    tiers.sized(run_cases, run_all)(runner)


@pytest.mark.exhaustive
def test_every_barrier_is_missed(runner):
    assert outcome(runner, 0) == ""
    found = {str(barrier): outcome(runner, barrier.number) for barrier in kernel_barriers.barriers()}
    assert len(found) > 20
    assert [barrier for barrier, problem in found.items() if not problem] == []


def test_no_barrier_is_overlooked():
    """What may wait or order, and is not deleted."""
    (declared,) = kernel_barriers.unknown()
    assert declared.startswith("TIDE_DEVICE void await(")
    found = {(barrier.file, barrier.code.split("(")[0]) for barrier in kernel_barriers.barriers()}
    assert found >= {("block.cuh", "__syncthreads"), ("block.cuh", "__threadfence"), ("unit.cuh", "block.phase")}
    codes = [barrier.code for barrier in kernel_barriers.barriers()]
    for counted in ("atomicInc(", "atomicAdd(", "atomicExch(", "await(block, of.done + kDown", "of.done + kUp, static"):
        assert any(counted in code for code in codes), counted


def test_a_race_is_reported_with_both_lines(runner):
    barrier = next(each for each in kernel_barriers.barriers() if "top[own] = seen" in each.code)
    problem = outcome(runner, barrier.number)
    assert problem.startswith("race in shared memory of block ")
    assert problem.count("kernel.cu:") >= 2, problem


FAULTS = [
    (0, ""),
    (1, "race in shared memory of block|never written: shared memory of block"),
    (2, "a barrier that not all reach: of block"),
    (3, "never written: shared memory of block"),
    (4, "beyond the end of shared memory of block"),
    (5, "race in global memory: "),
    (6, "race in global memory: "),
    (7, "looks at a counter that nobody changes"),
    (8, "race in global memory: "),
    (9, "race in global memory: "),
    (10, "race in global memory: "),
    (11, "race in global memory: "),
    (12, "looks at a counter that nobody changes"),
]


@pytest.fixture(scope="module")
def faulty(builds: Builds) -> ctypes.CDLL:
    need(shutil.which("g++") is not None, "there is no g++")
    loaded = ctypes.CDLL(str(kernel_barriers.build_faulty(builds)))
    loaded.fibres_problem.restype = ctypes.c_char_p
    loaded.tide_kernels_emulate.argtypes = [ctypes.c_uint64]
    return loaded


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_the_fibres_report_faults(faulty, fault, expected):
    """The checks' own test: both blocks at the same time, and one after the other, in some order."""
    found = []
    for order, resident in ((1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1)):
        faulty.tide_kernels_emulate(order)
        faulty.fibres_set_resident(resident)
        data, counters = np.zeros(64, np.float32), np.zeros(2, np.uint32)
        status = faulty.start(fault, data.ctypes.data_as(ctypes.c_void_p), counters.ctypes.data_as(ctypes.c_void_p))
        problem = faulty.fibres_problem().decode()
        assert (status == 0) == (problem == "")
        assert problem == "" or any(each in problem for each in expected.split("|")), problem
        found.append(problem)
    assert any(found) == bool(fault)
