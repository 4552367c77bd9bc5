"""The kernels' own code on the CPU: every value against float64, every write where it belongs, and no race.

The blocks, threads and phases are those of the GPU build (plugins/common/block.cuh); what only a GPU has, its memory
system and tensor cores, is not in these tests but in tests/gpu.
"""

import os
import subprocess
import sys
from pathlib import Path

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
    run_route,
)
from kernel_runner import Runner, poison, tk
from native_builds import KERNELS_EMULATED, ROOT, cuda_headers, need


@pytest.fixture(scope="module")
def runner(emulated_library: Path) -> Runner:
    return Runner(emulated_library)


@pytest.fixture
def emulate(runner: Runner):
    yield runner.kernels.emulate
    runner.kernels.emulate()


@pytest.mark.parametrize(
    "case",
    [
        RouteCase(1, 8192, 512),
        RouteCase(1, 4096, 128, 256, states=B, weights=B),
        RouteCase(19, 1000, 130, 19, norm=RMS),
        RouteCase(19, 2048, 64, 256, states=H, weights=H, norm=RMS),
        RouteCase(32, 777, 512, states=B, weights=B, norm=LAYER, shift=True),
        RouteCase(33, 640, 65, 33, states=H, weights=F, norm=LAYER),
        RouteCase(111, 511, 1, 2, states=F),
        RouteCase(111, 512, 128, states=H, weights=H, norm=RMS, scale_offset=1.0, padding=5),
        RouteCase(989, 192, 33, 7, states=B, weights=F, norm=RMS, row_thresholds=True),
        RouteCase(989, 257, 16, 40, states=B, weights=B),
        RouteCase(4096, 64, 1, states=F, norm=LAYER),
        RouteCase(4096, 64, 17, 3, states=H, weights=H),
    ],
    ids=str,
)
def test_route(runner, case):
    check_route(runner, case, tolerance(case))


@pytest.mark.parametrize("kind", [F, H, B])
def test_a_row_s_score_does_not_depend_on_the_others(runner, kind):
    check_route_rows_alone(
        runner, RouteCase(520, 300, 24, 17, states=kind, weights=kind, norm=RMS), [1, 4, 17, 33, 512]
    )


@pytest.mark.parametrize("kind", [F, H, B])
def test_route_keeps_nan_to_its_row(runner, kind):
    check_route_nan(runner, RouteCase(33, 300, 24, 17, states=kind, weights=kind, norm=RMS))


def test_route_before_tensor_cores_knew_bfloat16(runner, emulate):
    emulate(0, 7)
    check_route(runner, RouteCase(33, 300, 24, 17, states=B, weights=B), 2e-5)
    check_route(runner, RouteCase(7, 300, 24, 17, states=B, weights=B), 2e-5)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_order_of_threads_and_blocks_does_not_matter(runner, emulate, order):
    emulate(order)
    run_all(runner)


def test_a_score_has_the_same_bits_in_any_order(runner, emulate):
    case = RouteCase(17, 300, 24, 17, norm=RMS)
    data = route_data(case)
    ascending, _ = run_route(runner, case, data)
    emulate(5)
    shuffled, _ = run_route(runner, case, data)
    assert np.array_equal(ascending.view(np.int32), shuffled.view(np.int32))


def test_addresses_that_allow_no_packs(emulated_library):
    """Every array is 8 bytes off a multiple of 16."""
    run_all(Runner(emulated_library, guard=24))


@pytest.mark.parametrize("norm", [tk.NORM_NONE, RMS, LAYER])
@pytest.mark.parametrize(("kind", "weights"), [(F, F), (H, H), (B, B), (H, F)])
def test_exit_scatter(runner, kind, weights, norm):
    for case in (
        ScatterCase(1, 64, 0, kind, weights, norm),
        ScatterCase(33, 300, 0, kind, weights, norm, shift=norm == LAYER, output_rows=20, padding=3),
        ScatterCase(19, 111, 33, kind, weights, norm, shift=norm == LAYER),
    ):
        check_scatter(runner, case, tolerance(case))


@pytest.mark.parametrize("rows", [0, 1, 19, 32, 33, 111, 989, 1024, 1025, 4096])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_compact(runner, rows, share):
    for row_bytes, padding in ((1, 0), (6, 2), (32, 16)):
        check_compact(runner, rows, row_bytes, share, padding=padding)


@pytest.mark.parametrize(("batch", "tokens", "capacity"), [(1, 1, 1), (5, 3, 16), (3, 0, 8), (4, 9, 8), (33, 2, 300)])
def test_gather_pending(runner, batch, tokens, capacity):
    for token_bytes in (2, 12, 64):
        check_gather(runner, batch, tokens, capacity, token_bytes)


def test_no_rows_are_no_work(runner):
    runner.kernels.start("tide_route", route_args(rows=0))
    args = tk.ExitScatterArgs(hidden=8, layer=1)
    runner.kernels.start("tide_exit_scatter", args)
    runner.kernels.start("tide_gather_pending", tk.GatherPendingArgs(token_bytes=4, tokens=1))


def route_args(**changes) -> tk.RouteArgs:
    args = tk.RouteArgs(rows=2, hidden=8, bottleneck=4, states_stride=8)
    for name, value in changes.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"hidden": 0}, id="no width"),
        pytest.param({"bottleneck": 0}, id="no bottleneck"),
        pytest.param({"shortlist": 1}, id="no second token"),
        pytest.param({"rows": -1}, id="negative rows"),
        pytest.param({"rows": 2**31}, id="more rows than a grid has blocks"),
        pytest.param({"states_type": 3}, id="unknown type"),
        pytest.param({"states_type": F, "weights_type": H}, id="weights narrower than states"),
        pytest.param({"norm": tk.NormArgs(kind=RMS)}, id="norm without a scale"),
        pytest.param({"norm": tk.NormArgs(kind=7)}, id="unknown norm"),
        pytest.param({}, id="null pointers"),
    ],
)
def test_unusable_arguments_are_refused(runner, changes):
    with pytest.raises(tk.KernelError, match="tide_route gave CUDA error 1"):
        runner.kernels.start("tide_route", route_args(**changes), 256, 2**40)


def test_a_workspace_that_is_too_small_is_refused(runner):
    args = route_args(scores=64, exits=64, states=64, down=64, up=64, bias=64, threshold=64)
    size = runner.kernels.workspace("tide_route", args)
    with pytest.raises(tk.KernelError):
        runner.kernels.start("tide_route", args, 256, size - 1)


def test_the_workspace_for_many_rows_is_enough_for_fewer(runner):
    sizes = [
        runner.kernels.workspace("tide_route", route_args(rows=rows, hidden=5000, bottleneck=100))
        for rows in (1, 2, 31, 512, 513, 600, 4096, 100_000)
    ]
    assert sizes == sorted(sizes)


def test_the_loader_refuses_another_version(monkeypatch, emulated_library):
    monkeypatch.setattr(tk, "VERSION", 99)
    with pytest.raises(tk.KernelError, match="this file is for version 99"):
        tk.Kernels(emulated_library)


def test_the_guards_see_a_write_that_goes_too_far(runner):
    """The runner's own test: an output declared one row too small is an overrun."""
    args = tk.GatherPendingArgs(batch=1, tokens=1, capacity=4, token_bytes=4)
    inputs = {"states": np.zeros(4, np.uint8), "lengths": np.zeros(1, np.int32)}
    outputs = {"pending": np.zeros(16, np.uint8), "counts": np.zeros(1, np.int32), "positions": poison((3,), np.int32)}
    outputs["counts"][0] = 2
    args.tokens = 2
    inputs["states"] = np.zeros(8, np.uint8)
    with pytest.raises(AssertionError, match="wrote outside"):
        runner.run("tide_gather_pending", args, inputs, outputs)


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
