"""Routers for which the plugin needs more memory than the GPU has are refused in one sentence: by `export` before they
are calibrated, by `build` before an engine is built. That the sizes are the kernel's: plugins/test_exit_memory.py.
"""

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from tide_export.bundle.file_names import ROUTERS_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.errors import BuildError, BundleError
from tide_export.names.operators import OP_EXIT
from tide_export.pipeline import preflight, request
from tide_export.pipeline.flow import export
from tide_export.plans import build, exit_memory
from tide_export.plans import rebuild as rebuilding
from tide_export.plans.exit_memory import ExitSizes, check_exit_memory, router_file_sizes, warn_of_exit_memory
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.tensorrt import gpu
from tide_export.runtime.tensorrt.plugins import PluginLibrary

LARGE = ExitSizes(4096, 128, 4096, 64)
LIBRARY = PluginLibrary(Path("plugins.so"), "0", "11.1", "0" * 64)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Puts a GPU of a compute capability into this machine, with so many KiB and multiprocessors."""

    def put(capability: tuple[int, int], shared: int, processors: int = 100) -> None:
        monkeypatch.setattr(exit_memory, "compute_capability", lambda: capability)
        monkeypatch.setattr(exit_memory, "block_limits", lambda: (shared * 1024, processors))

    return put


def test_what_does_not_fit_is_told_with_what_would(on) -> None:
    on((12, 0), 99)
    with pytest.raises(BuildError) as error:
        check_exit_memory(LARGE)
    assert str(error.value) == (
        "the plugin TideExit needs 109 KiB of shared memory in each block with these routers, and this GPU, of compute "
        "capability 12.0, has 99: calibrate routers with router_shortlist 3516 at most, or build without it (--plugins "
        "none)"
    )
    check_exit_memory(ExitSizes(4096, 128, 3516, 64))
    on((9, 0), 227)
    check_exit_memory(LARGE)


@pytest.mark.parametrize(
    ("sizes", "cure"),
    [
        (ExitSizes(4096, 128, 0, 4000), "lens_rank 1822 at most"),
        (ExitSizes(4096, 9000, 2, 64), "router_bottleneck_dim 3642 at most"),
        (ExitSizes(100_000, 9000, 500, 4000), None),
    ],
)
def test_the_first_setting_that_alone_suffices_is_named(on, sizes: ExitSizes, cure: str | None) -> None:
    on((12, 0), 99)
    with pytest.raises(BuildError) as error:
        check_exit_memory(sizes)
    calibrate = f"calibrate routers with {cure}, or " if cure else ""
    assert str(error.value).endswith(f"has 99: {calibrate}build without it (--plugins none)")


def test_a_gpu_of_few_multiprocessors_needs_more(on) -> None:
    """Without clusters a team has no more blocks than the GPU has multiprocessors, and each takes more channels."""
    on((7, 5), 64, 40)
    check_exit_memory(ExitSizes(16256, 128, 4096, 64))
    on((7, 5), 64, 14)
    with pytest.raises(
        BuildError, match=r"needs 65 KiB .* compute capability 7\.5, has 64: calibrate .* lens_rank 16 at"
    ):
        check_exit_memory(ExitSizes(16256, 128, 4096, 64))


def test_where_there_is_no_gpu_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_memory, "block_limits", lambda: None)
    check_exit_memory(ExitSizes(100_000, 9000, 500, 4000))


def test_what_runs_on_some_gpus_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_exit_memory(ExitSizes(8192, 128, 256, 64))
    assert not caplog.messages
    warn_of_exit_memory(LARGE)
    assert caplog.messages == [
        "on GPUs of compute capability 12.0, 12.1 plans cannot hold the plugin TideExit, which needs up to 109 KiB "
        "of shared memory in each block with these routers: calibrate routers with router_shortlist 3516 at most, or "
        "build without it (--plugins none)"
    ]


def test_the_driver_is_asked_for_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {16: 132, 75: 9, 76: 0, 97: 232_448}

    def tell(number, attribute: int, device) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = answers.get(attribute, 0)
        return 0 if attribute in answers else 1

    driver = SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetAttribute=tell)
    monkeypatch.setattr(gpu, "_driver", lambda: driver)
    gpu.block_limits.cache_clear()
    gpu.compute_capability.cache_clear()
    try:
        assert (gpu.block_limits(), gpu.compute_capability()) == ((227 * 1024, 132), (9, 0))
        gpu.block_limits.cache_clear()
        del answers[97]
        assert gpu.block_limits() is None
    finally:
        gpu.block_limits.cache_clear()
        gpu.compute_capability.cache_clear()


def test_a_router_file_has_the_sizes_of_the_networks(demo_bundle: Path, tiny_llama, tmp_path: Path) -> None:
    """Those that TensorRT gives the plugin are the shapes of the constants beside it."""
    for bundle in (demo_bundle, tiny_llama.exact):
        found = router_file_sizes(bundle / ROUTERS_FILE)
        for network in sorted((bundle / "segments").glob("segment_*.onnx"))[:-1]:
            graph = onnx.load(str(network), load_external_data=False).graph
            shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
            (node,) = (node for node in graph.node if node.op_type == OP_EXIT)
            given = {attribute.name: attribute.i for attribute in node.attribute}
            down, *rest = (shapes[name] for name in [node.input[4], *node.input[7:]])
            shortlist = rest[0][1] if given["shortlist"] else 0
            rank = rest[2 if shortlist else 0][1] if given["lens"] else 0
            assert found == ExitSizes(down[0], down[1], shortlist, rank)
    routers = RouterSet.load(demo_bundle / ROUTERS_FILE)
    source = SimpleNamespace(hidden_size=routers.hidden_size, normalized_size=routers.hidden_size, vocab_size=9999)
    assert preflight.exit_sizes(source, TideConfig(), routers) == router_file_sizes(demo_bundle / ROUTERS_FILE)
    assert router_file_sizes(tmp_path / "none") is None


@pytest.mark.parametrize(
    "text", [b"", b"no router file", bytes([9]) + bytes(7) + b"[1, 2, 3]", b"\x02\0\0\0\0\0\0\0{}"]
)
def test_a_damaged_router_file_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "routers").write_bytes(text)
    with pytest.raises(BundleError, match="is no router file: export the bundle again or copy it anew"):
        router_file_sizes(tmp_path / "routers")


def test_the_largest_that_calibration_can_give() -> None:
    source = SimpleNamespace(hidden_size=100, normalized_size=96, vocab_size=1000)

    def sizes(**fields: object) -> ExitSizes:
        return preflight.exit_sizes(source, TideConfig(**fields), None)

    assert sizes() == ExitSizes(96, 128, 256, 50)
    assert sizes(router_shortlist=4000, lens_rank=8) == ExitSizes(96, 128, 1000, 8)
    assert sizes(router_shortlist=0, exit_strategy="identity", router_bottleneck_dim=7) == ExitSizes(96, 7, 0, 0)
    assert sizes(router_shortlist=1).shortlist == 2


def test_build_refuses_before_it_builds(demo_bundle: Path, tmp_path: Path, on, monkeypatch, capsys) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    before = open_bundle(bundle).manifest
    monkeypatch.setattr(rebuilding, "require_builder", lambda flavour: "11.1.0.106")
    monkeypatch.setattr(build, "require_builder", lambda flavour: "11.1.0.106")
    monkeypatch.setattr(rebuilding, "plugins_to_build_with", lambda *_: LIBRARY)
    monkeypatch.setattr(build, "run_worker", lambda *_: pytest.fail("built first"))
    on((8, 6), 20)
    assert main(["build", str(bundle), "--target", "tensorrt", "-q"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the plugin TideExit needs" in line
    assert line.endswith("build without it (--plugins none)")
    assert open_bundle(bundle).manifest == before


@pytest.mark.parametrize("given", [False, True])
def test_export_refuses_before_it_calibrates(
    demo_model: Path, demo_bundle: Path, tmp_path: Path, on, monkeypatch, given: bool
) -> None:
    monkeypatch.setattr(request, "require_builder", lambda flavour: "11.1.0.106")
    monkeypatch.setattr(request, "plugins_to_build_with", lambda *_: LIBRARY)
    monkeypatch.setattr("tide_export.pipeline.flow.trace", lambda *_, **__: pytest.fail("traced first"))
    on((12, 0), 38)
    routers = demo_bundle / ROUTERS_FILE if given else None
    with pytest.raises(
        BuildError, match=r"this GPU, of compute capability 12\.0, has 38: calibrate routers with router_"
    ):
        export(str(demo_model), tmp_path / "out", targets=("tensorrt",), routers=routers)


def test_export_without_plans_warns_unless_told_to_do_without(monkeypatch, caplog) -> None:
    checked = preflight._check_plugin
    asked = SimpleNamespace(engines=False, plugins=None, plugin_library=None)
    checked(asked, LARGE)
    assert "on GPUs of compute capability 12.0, 12.1 plans cannot hold the plugin TideExit" in caplog.text
    caplog.clear()
    asked.plugins = "none"
    checked(asked, LARGE)
    asked.engines = True
    checked(asked, LARGE)
    assert not caplog.messages
