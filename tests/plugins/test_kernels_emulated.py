"""The kernel on the CPU, each of its threads a fibre (`fibres/`): every value against float64, every write where it
belongs, what is launched. Races and barriers: test_kernel_barriers.py; a GPU's own memory and time: tests/gpu.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiers
from fibre_runner import FibreRunner
from kernel_cases import CASES, LAYER, NONE, RMS, B, ExitCase, F, H, run_all, run_cases, tolerance
from kernel_checks import check_exit, check_nan, check_slots_alone, exit_args, exit_data, run_exit
from kernel_runner import tk
from native_builds import ROOT, Builds, need


@pytest.fixture(scope="module")
def library(emulated: Path) -> FibreRunner:
    return FibreRunner(emulated / "libtide_kernels_emulated.so")


@pytest.fixture
def runner(library: FibreRunner) -> FibreRunner:
    library.emulate()
    return library


@pytest.mark.parametrize(
    "case",
    [
        ExitCase(1, 8192, 512, norm=NONE),
        ExitCase(1, 4096, 128, 256, 64, B),
        ExitCase(8, 2048, 64, 256, 32, H, tokens=5, exit_rows=4),
        ExitCase(19, 1000, 130, 19, 9, F, LAYER),
        ExitCase(33, 640, 65, 33, 0, H, LAYER, shift=True),
        ExitCase(64, 192, 33, 7, 5, B),
        ExitCase(64, 576, 16, 40, 0, F),
        ExitCase(2, 640, 24, 300, 300, F),
    ],
    ids=str,
)
def test_exit(runner, case):
    check_exit(runner, case, tolerance(case))


def test_more_slots_than_a_launch_takes(runner):
    """Two launches that share counters and workspace; the second one's slots are as they are alone."""
    case = ExitCase(259, 16, 3, 2, 2, F)
    runner.launches()
    check_exit(runner, case, tolerance(case))
    units = 1 + 1 + 2  # of a group: of the lens's matmuls, and of the router's with a tile for the shortlist
    assert [launch["blocks"] for launch in runner.launches()] == [64 * units, units]
    check_slots_alone(runner, case, [3])


@pytest.mark.parametrize("kind", tiers.exhaustive_but([F, B], [F, H, B]))
def test_a_slot_s_results_do_not_depend_on_the_others(runner, kind):
    check_slots_alone(runner, ExitCase(37, 300, 24, 17, 6, kind), [1, 3, 4, 5, 17])


@pytest.mark.parametrize("kind", [F, H, B])
def test_nan_stays_in_its_slot(runner, kind):
    check_nan(runner, ExitCase(9, 300, 24, 17, 6, kind))


@pytest.mark.parametrize(("order", "resident"), tiers.exhaustive_beyond(2, [(3, 64), (1, 1), (2, 7), (4, 1000)]))
def test_the_order_of_threads_and_blocks_does_not_matter(runner, order, resident):
    """However few blocks the GPU takes at a time, those that wait do not keep out those that they wait for."""
    runner.emulate(order, resident)
    run_all(runner)


def test_a_score_has_the_same_bits_in_any_order_and_with_any_number_of_blocks_at_a_time(runner):
    case = ExitCase(17, 300, 24, 17, 5, norm=LAYER)
    data = exit_data(case)
    ascending = run_exit(runner, case, data)
    for order, resident in ((5, 3), (6, 64), (7, 1000)):
        runner.emulate(order, resident)
        shuffled = run_exit(runner, case, data)
        assert np.array_equal(ascending.scores.view(np.int32), shuffled.scores.view(np.int32))


def test_addresses_that_allow_no_fours(emulated):
    """Every array is 4 bytes off a multiple of 8."""
    runner = FibreRunner(emulated / "libtide_kernels_emulated.so", guard=20)
    runner.emulate()  # an earlier test's order and blocks stay with the library
    tiers.sized(run_cases, run_all)(runner)


@pytest.mark.parametrize(
    ("sizes", "units"),
    [
        # ranges of rows x tiles of the router; the lens's ranges and tiles
        pytest.param((4096, 128, 0, 0), 128, id="32 rows a block"),
        pytest.param((4096, 128, 256, 0), 43 * 3, id="96 rows a block, shortlist and bottleneck"),
        pytest.param((3072, 128, 256, 64), 39 * 3 + 24 + 24, id="80 rows a block, and a lens of 128 rows a block"),
        pytest.param((8192, 512, 300, 200), 64 * 7 + 64 * 2 + 64, id="more than there are multiprocessors"),
        pytest.param((300, 24, 17, 6), 19 * 2 + 3 + 3, id="16 rows at least"),
    ],
)
def test_a_launch_covers_a_large_gpu(runner, sizes, units):
    """Blocks for one group of slots; a block's threads and memory are what every GPU gives unasked."""
    case = ExitCase(1, *sizes, H)
    runner.launches()
    check_exit(runner, case, tolerance(case))
    assert runner.launches() == [{"blocks": units, "threads": 512, "shared": (512 + 8192 + 1536 + 8 + 4 + 4) * 4}]


def test_no_slots_are_no_work(runner):
    runner.kernels.exit(args_with(slots=0), None, 0, None)


def args_with(**changes) -> tk.ExitArgs:
    args = exit_args(ExitCase(2, 8, 4, norm=NONE))
    for name, value in changes.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"hidden": 0}, id="no width"),
        pytest.param({"bottleneck": 0}, id="no bottleneck"),
        pytest.param({"tokens": 0}, id="no token"),
        pytest.param({"exit_rows": 0}, id="no row for the exit state"),
        pytest.param({"shortlist": 1}, id="no second token"),
        pytest.param({"lens_rank": -1}, id="negative rank"),
        pytest.param({"slots": -1}, id="negative slots"),
        pytest.param({"slots": 2**31}, id="more slots than can be counted"),
        pytest.param({"hidden": 2**31}, id="wider than can be counted"),
        pytest.param({"states_type": 3}, id="unknown type"),
        pytest.param({"norm": tk.NormArgs(kind=7)}, id="unknown norm"),
        pytest.param({"states": None}, id="null pointer"),
        pytest.param({"shortlist": 2}, id="shortlist without weights"),
        pytest.param({"lens_rank": 2}, id="lens without weights"),
        pytest.param({"norm": tk.NormArgs(kind=RMS)}, id="norm without a scale"),
    ],
)
def test_unusable_arguments_are_refused(runner, changes):
    names = ("states", "last_tokens", "thresholds", "down", "up", "bias", "exit_states", "scores", "exits")
    args = args_with(**(dict.fromkeys(names, 64) | changes))
    with pytest.raises(tk.KernelError, match="tide_exit gave CUDA error 1"):
        runner.kernels.exit(args, 256, 2**40, 256)


def test_a_workspace_that_is_too_small_and_no_counters_are_refused(runner):
    names = ("states", "last_tokens", "thresholds", "down", "up", "bias", "exit_states", "scores", "exits")
    args = args_with(**dict.fromkeys(names, 64))
    with pytest.raises(tk.KernelError):
        runner.kernels.exit(args, 256, runner.kernels.exit_workspace(args) - 1, 256)
    with pytest.raises(tk.KernelError):
        runner.kernels.exit(args, 256, runner.kernels.exit_workspace(args), None)


def test_the_workspace_for_many_slots_is_enough_for_fewer(runner):
    sizes = [
        runner.kernels.exit_workspace(exit_args(ExitCase(slots, 5000, 100, 30, 12)))
        for slots in (1, 2, 4, 5, 16, 17, 64, 1000)
    ]
    assert sizes == sorted(sizes)


def test_the_loader_refuses_another_version(monkeypatch, emulated):
    monkeypatch.setattr(tk, "VERSION", 99)
    with pytest.raises(tk.KernelError, match="this file is for version 99"):
        tk.Kernels(emulated / "libtide_kernels_emulated.so")


def test_the_guards_see_a_write_that_goes_too_far(runner):
    """The runner's own test: an output given with one slot too few is an overrun."""
    case = CASES[0]
    data = exit_data(case)
    outputs = {name: np.zeros(0, np.uint8) for name in ("scores", "exits")}
    outputs["exit_states"] = np.zeros((1, 2, case.hidden), np.float32)
    with pytest.raises(AssertionError, match="wrote outside"):
        runner.run(exit_args(case), data.inputs(), outputs, data.norm)


@pytest.mark.exhaustive
def test_under_an_address_sanitizer(builds: Builds):
    """Every buffer is an allocation of its own, and so is each block's shared memory."""
    folder = builds.plugins("sanitized", "tide_kernels_emulated") / "emulated"
    command = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    need(Path(library).is_absolute(), "g++ has no address sanitizer")
    script = ROOT / "tests" / "plugins" / "kernel_cases.py"
    command = [sys.executable, str(script), str(folder / "libtide_kernels_emulated.so")]
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cases hold" in done.stdout
