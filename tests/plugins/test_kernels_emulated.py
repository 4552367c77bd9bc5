"""The kernel's own code on the CPU: every value against float64, every write where it belongs, and no race.

Teams, blocks, threads, stages and phases are those of the GPU build (plugins/common/team.cuh); what only a GPU has, its
memory system and barriers, is not in these tests but in tests/gpu.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import CASES, LAYER, NONE, RMS, B, ExitCase, F, H, run_all, tolerance
from kernel_checks import check_exit, check_nan, check_slots_alone, exit_args, exit_data, run_exit
from kernel_runner import Runner, tk
from native_builds import KERNELS_EMULATED, ROOT, cuda_headers, need

LONE, CLUSTERS, SMALL_CLUSTERS = 8, 9, 12  # compute capabilities: no clusters, clusters of 16 blocks, and of 8


@pytest.fixture(scope="module")
def runner(emulated_library: Path) -> Runner:
    return Runner(emulated_library)


@pytest.fixture
def emulate(runner: Runner):
    yield runner.kernels.emulate
    runner.kernels.emulate()


@pytest.mark.parametrize("capability", [LONE, CLUSTERS])
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
    ],
    ids=str,
)
def test_exit(runner, emulate, case, capability):
    emulate(0, capability)
    check_exit(runner, case, tolerance(case))


@pytest.mark.parametrize("kind", [F, H, B])
@pytest.mark.parametrize("capability", [LONE, CLUSTERS])
def test_a_slot_s_results_do_not_depend_on_the_others(runner, emulate, kind, capability):
    emulate(0, capability)
    check_slots_alone(runner, ExitCase(37, 300, 24, 17, 6, kind), [1, 3, 4, 5, 17])


@pytest.mark.parametrize("kind", [F, H, B])
def test_nan_stays_in_its_slot(runner, kind):
    check_nan(runner, ExitCase(9, 300, 24, 17, 6, kind))


@pytest.mark.parametrize(("order", "capability"), [(1, LONE), (2, CLUSTERS), (3, SMALL_CLUSTERS), (4, CLUSTERS)])
def test_the_order_of_threads_blocks_and_teams_does_not_matter(runner, emulate, order, capability):
    emulate(order, capability)
    run_all(runner)


def test_a_score_has_the_same_bits_in_any_order_and_with_or_without_clusters(runner, emulate):
    case = ExitCase(17, 300, 24, 17, 5, norm=LAYER)
    data = exit_data(case)
    ascending = run_exit(runner, case, data)
    for order, capability in ((5, LONE), (6, CLUSTERS)):
        emulate(order, capability)
        shuffled = run_exit(runner, case, data)
        assert np.array_equal(ascending.scores.view(np.int32), shuffled.scores.view(np.int32))


def test_addresses_that_allow_no_fours(emulated_library):
    """Every array is 4 bytes off a multiple of 8."""
    run_all(Runner(emulated_library, guard=20))


def test_no_slots_are_no_work(runner):
    runner.kernels.exit(args_with(slots=0), None, 0)


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
        pytest.param({"slots": 2**31}, id="more slots than a grid has blocks"),
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
        runner.kernels.exit(args, 256, 2**40)


def test_a_workspace_that_is_too_small_is_refused(runner):
    names = ("states", "last_tokens", "thresholds", "down", "up", "bias", "exit_states", "scores", "exits")
    args = args_with(**dict.fromkeys(names, 64))
    with pytest.raises(tk.KernelError):
        runner.kernels.exit(args, 256, runner.kernels.exit_workspace(args) - 1)


def test_the_workspace_for_many_slots_is_enough_for_fewer(runner):
    sizes = [
        runner.kernels.exit_workspace(exit_args(ExitCase(slots, 5000, 100, 30, 12)))
        for slots in (1, 2, 4, 5, 16, 17, 64, 1000)
    ]
    assert sizes == sorted(sizes)


def test_the_loader_refuses_another_version(monkeypatch, emulated_library):
    monkeypatch.setattr(tk, "VERSION", 99)
    with pytest.raises(tk.KernelError, match="this file is for version 99"):
        tk.Kernels(emulated_library)


def test_the_guards_see_a_write_that_goes_too_far(runner):
    """The runner's own test: an output given with one slot too few is an overrun."""
    case = CASES[0]
    data = exit_data(case)
    outputs = {name: np.zeros(0, np.uint8) for name in ("scores", "exits")}
    outputs["exit_states"] = np.zeros((1, 2, case.hidden), np.float32)
    with pytest.raises(AssertionError, match="wrote outside"):
        runner.run(exit_args(case), data.inputs(), outputs, data.norm)


def test_under_an_address_sanitizer(builds):
    """Every buffer is an allocation of its own."""
    need(cuda_headers() is not None, "there are no CUDA headers")
    build = builds.emulated(KERNELS_EMULATED, "sanitized")
    command = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    need(Path(library).is_absolute(), "g++ has no address sanitizer")
    script = ROOT / "tests" / "plugins" / "kernel_cases.py"
    command = [sys.executable, str(script), str(build / "plugins" / "emulated" / "libtide_kernels_emulated.so")]
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cases hold" in done.stdout
