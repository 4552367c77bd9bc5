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
from fibre_runner import CLUSTERS, LONE, SMALL_CLUSTERS, FibreRunner
from kernel_cases import CASES, LAYER, NONE, RMS, B, ExitCase, F, H, run_all, run_cases, tolerance
from kernel_checks import check_exit, check_nan, check_slots_alone, exit_args, exit_data, run_exit
from kernel_runner import tk
from native_builds import ROOT, Builds, need


@pytest.fixture(scope="module")
def runners(emulated: Path) -> dict[bool, FibreRunner]:
    return {clusters: FibreRunner(emulated / f"libtide_kernels_sm{90 if clusters else 75}.so") for clusters in (0, 1)}


@pytest.fixture
def emulate(runners):
    def choose(order: int, capability: int, processors: int = 64) -> FibreRunner:
        runner = runners[capability >= CLUSTERS]
        runner.emulate(order, capability, processors)
        return runner

    return choose


@pytest.fixture
def runner(emulate) -> FibreRunner:
    return emulate(0, CLUSTERS)


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
def test_exit(emulate, case, capability):
    check_exit(emulate(0, capability), case, tolerance(case))


@pytest.mark.parametrize(
    ("kind", "capability"),
    tiers.exhaustive_but([(F, LONE), (B, CLUSTERS)], [(k, c) for k in (F, H, B) for c in (LONE, CLUSTERS)]),
)
def test_a_slot_s_results_do_not_depend_on_the_others(emulate, kind, capability):
    check_slots_alone(emulate(0, capability), ExitCase(37, 300, 24, 17, 6, kind), [1, 3, 4, 5, 17])


@pytest.mark.parametrize("kind", [F, H, B])
def test_nan_stays_in_its_slot(runner, kind):
    check_nan(runner, ExitCase(9, 300, 24, 17, 6, kind))


@pytest.mark.parametrize(
    ("order", "capability"), tiers.exhaustive_beyond(1, [(3, SMALL_CLUSTERS), (1, LONE), (2, CLUSTERS), (4, CLUSTERS)])
)
def test_the_order_of_threads_blocks_and_teams_does_not_matter(emulate, order, capability):
    run_all(emulate(order, capability))


def test_a_score_has_the_same_bits_in_any_order_and_with_or_without_clusters(emulate):
    case = ExitCase(17, 300, 24, 17, 5, norm=LAYER)
    data = exit_data(case)
    ascending = run_exit(emulate(0, LONE), case, data)
    for order, capability in ((5, LONE), (6, CLUSTERS)):
        shuffled = run_exit(emulate(order, capability), case, data)
        assert np.array_equal(ascending.scores.view(np.int32), shuffled.scores.view(np.int32))


def test_addresses_that_allow_no_fours(emulated):
    """Every array is 4 bytes off a multiple of 8."""
    tiers.sized(run_cases, run_all)(FibreRunner(emulated / "libtide_kernels_sm90.so", guard=20))


@pytest.mark.parametrize(
    ("capability", "processors", "blocks", "cluster"),
    [
        pytest.param(LONE, 200, 64, 1, id="four teams, which take five groups"),
        pytest.param(LONE, 40, 32, 1, id="two teams"),
        pytest.param(LONE, 30, 16, 1, id="one team"),
        pytest.param(LONE, 7, 4, 1, id="a team of four blocks"),
        pytest.param(LONE, 1, 1, 1, id="a team of one block"),
        pytest.param(CLUSTERS, 64, 80, 16, id="a cluster of 16 for each group"),
        pytest.param(SMALL_CLUSTERS, 64, 40, 8, id="a cluster of 8 for each group"),
    ],
)
def test_what_is_launched(emulate, capability, processors, blocks, cluster):
    """What CUDA is given, and that it takes it: the stand-in refuses as CUDA does."""
    case = ExitCase(17, 300, 40, 10, 6, H)
    runner = emulate(3, capability, processors)
    runner.launches()
    check_exit(runner, case, tolerance(case))
    (launch,) = runner.launches()
    assert (launch["blocks"], launch["threads"], launch["cluster"]) == (blocks, 512, cluster)
    lone = capability == LONE
    assert (launch["cooperative"], launch["overlaps"], launch["non_portable"]) == (lone, not lone, not lone)
    of_team = min(blocks, 16) if lone else cluster
    share, region = -(-300 // (8 * of_team)) * 8, 4 * (6 + 3 + 50 + 1)
    floats = 4 * share + 4 * 6 + 16 * 4 * 128 + (0 if lone else region)
    assert launch["shared"] == floats * 4 < launch["largest_shared"]


@pytest.mark.parametrize("capability", [LONE, CLUSTERS, SMALL_CLUSTERS])
def test_more_shared_memory_than_a_kernel_has_unasked(emulate, capability):
    case = ExitCase(1, 64, 8, 0, 1200, F)
    runner = emulate(0, capability)
    runner.launches()
    check_exit(runner, case, tolerance(case))
    (launch,) = runner.launches()
    assert 48 * 1024 < launch["shared"] == launch["largest_shared"]


def test_more_shared_memory_than_the_gpu_has_is_refused(emulate):
    case = ExitCase(1, 64, 8, 0, 3000, F)
    check_exit(emulate(0, CLUSTERS), case, tolerance(case))
    with pytest.raises(tk.KernelError, match="CUDA error 1"):
        check_exit(emulate(0, SMALL_CLUSTERS), case, tolerance(case))


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


def test_the_loader_refuses_another_version(monkeypatch, emulated):
    monkeypatch.setattr(tk, "VERSION", 99)
    with pytest.raises(tk.KernelError, match="this file is for version 99"):
        tk.Kernels(emulated / "libtide_kernels_sm90.so")


def test_the_guards_see_a_write_that_goes_too_far(runner):
    """The runner's own test: an output given with one slot too few is an overrun."""
    case = CASES[0]
    data = exit_data(case)
    outputs = {name: np.zeros(0, np.uint8) for name in ("scores", "exits")}
    outputs["exit_states"] = np.zeros((1, 2, case.hidden), np.float32)
    with pytest.raises(AssertionError, match="wrote outside"):
        runner.run(exit_args(case), data.inputs(), outputs, data.norm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", [75, 90])
def test_under_an_address_sanitizer(builds: Builds, architecture: int):
    """Every buffer is an allocation of its own, and so is each block's shared memory."""
    folder = builds.plugins("sanitized", "tide_kernels_emulated") / "emulated"
    command = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    need(Path(library).is_absolute(), "g++ has no address sanitizer")
    script = ROOT / "tests" / "plugins" / "kernel_cases.py"
    command = [sys.executable, str(script), str(folder / f"libtide_kernels_sm{architecture}.so")]
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cases hold" in done.stdout
