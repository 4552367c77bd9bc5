"""The kernel has every barrier that it needs, and none that it does not: each is deleted in turn, and missed.

Every access to memory is observed: a race is one that no barrier separates from another thread's, in whatever order the
threads run (`fibres/races.cpp`).
"""

import ctypes
import shutil

import kernel_barriers
import numpy as np
import pytest
import tiers
from fibre_runner import CLUSTERS, LONE, PROCESSORS, SMALL_CLUSTERS, FibreError, FibreRunner
from kernel_barriers import Barrier
from kernel_cases import LAYER, ExitCase, run_all, run_cases, tolerance
from kernel_checks import check_exit
from native_builds import Builds, need

# Everything, in tiles, and two groups of slots; without a lens, whose stage is no other's barrier.
CASES = [ExitCase(5, 72, 130, 5, 3, norm=LAYER), ExitCase(3, 72, 9)]
# A team that takes both groups, and one of two blocks, of which each decides on two slots.
GPUS = {75: [(LONE, 16), (LONE, 2)], 90: [(CLUSTERS, PROCESSORS), (SMALL_CLUSTERS, PROCESSORS)]}

# Where a barrier is not missed, by a piece of its code or of what it ends.
NEEDLESS = [
    (75, "this_cluster().sync();", "not in this code"),
    (75, "cudaGridDependencySynchronize();", "not in this code"),
    (75, "team.wait_for_inputs();", "does nothing here: such a launch begins when the one before has ended"),
    (90, "this_grid().sync();", "not in this code"),
    (90, "if (thread >= block.blocks) return;", "a block decides on more than one slot in teams of two blocks alone"),
]


@pytest.fixture(scope="module")
def runners(builds: Builds) -> dict[int, FibreRunner]:
    need(shutil.which("g++") is not None, "there is no g++")
    return {architecture: FibreRunner(kernel_barriers.build(builds, architecture)) for architecture in GPUS}


def outcome(runner: FibreRunner, architecture: int, barrier: int) -> str:
    """What goes wrong without a barrier; nothing, if nothing does."""
    runner.without(barrier)
    try:
        for capability, processors in GPUS[architecture]:
            for case in CASES:
                runner.emulate(barrier + 1, capability, processors)
                check_exit(runner, case, tolerance(case))
    except FibreError as problem:
        return str(problem)
    except AssertionError:
        return "a wrong result"
    finally:
        runner.without(0)
    return ""


@pytest.mark.parametrize(
    ("architecture", "capability", "processors"), [(75, LONE, 32), (90, CLUSTERS, 64), (90, SMALL_CLUSTERS, 64)]
)
def test_no_race(runners, architecture, capability, processors):
    runners[architecture].emulate(7, capability, processors)
    tiers.sized(run_cases, run_all)(runners[architecture])


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", GPUS)
def test_every_barrier_is_missed(runners, architecture):
    assert outcome(runners[architecture], architecture, 0) == ""
    unnoticed: list[Barrier] = []
    for barrier in kernel_barriers.barriers():
        expected = [reason for of, code, reason in NEEDLESS if of == architecture and code in barrier.code]
        found = outcome(runners[architecture], architecture, barrier.number)
        print(f"{barrier}: {found or expected or 'nothing'}")
        if bool(found) == bool(expected):
            unnoticed.append(barrier)
    assert unnoticed == [], "not missed, or missed although NEEDLESS says that it is not"


def test_no_barrier_is_overlooked():
    """What may wait or order, and is not deleted."""
    assert kernel_barriers.unknown() == ["TIDE_DEVICE void wait_for_inputs() {"]
    found = {(barrier.file, barrier.code.split("(")[0]) for barrier in kernel_barriers.barriers()}
    assert found >= {("kernel.cu", "team.stage"), ("kernel.cu", "block.phase"), ("multiply.cuh", "block.phase")}
    assert found >= {("team.cuh", "__syncthreads"), ("team.cuh", "cooperative_groups::this_grid")}


def test_a_race_is_reported_with_both_lines(runners):
    barrier = next(each for each in kernel_barriers.barriers() if "all have read top[0]" in each.code)
    problem = outcome(runners[90], 90, barrier.number)
    assert problem.startswith("race in shared memory of block ")
    assert problem.count("kernel.cu:") >= 2, problem


FAULTS = [
    (0, ""),
    (1, "perhaps before the kernel before has ended: global memory, written by thread"),
    (2, "perhaps before its block has started: shared memory of block 1"),
    (3, "race in shared memory of block 0|never written: shared memory of block 0"),
    (4, "a barrier that not all reach: of block 0, 5 threads wait for their block, 27 for their cluster"),
    (5, "block 0 waits for blocks that have ended"),
    (6, "race in shared memory of block"),
    (7, "never written: shared memory of block 0, byte 128, read by thread 0 of block 0"),
    (8, "beyond the end of shared memory of block 0, byte 256, written by thread 0 of block 0"),
    (9, "race in global memory: "),
    (10, "a barrier of the grid in a launch that is not cooperative"),
    (11, "may end while others use its shared memory|perhaps after its block has ended"),
    (12, "may end while others use its shared memory|perhaps after its block has ended"),
]


@pytest.fixture(scope="module")
def faulty(builds: Builds) -> ctypes.CDLL:
    need(shutil.which("g++") is not None, "there is no g++")
    loaded = ctypes.CDLL(str(kernel_barriers.build_faulty(builds)))
    loaded.fibres_problem.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_the_fibres_report_faults(faulty, fault, expected):
    """The checks' own test."""
    blocks = 4 if fault == 9 else 2  # a second cluster
    data = np.zeros(blocks * 32, np.float32)
    status = faulty.start(fault, data.ctypes.data_as(ctypes.c_void_p), blocks)
    problem = faulty.fibres_problem().decode()
    assert (status, problem == "") == ((719, False) if fault else (0, True))
    assert any(each in problem for each in expected.split("|")), problem
