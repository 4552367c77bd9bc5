"""Which engine runs a bundle: had or refused with one sentence, and never another than the one asked for."""

import ctypes
import json
import logging
import re
import shutil
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bundles import PROFILES, with_engines, with_manifest

from tide_export.bundle.file_names import plan_file
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.cli.main import main
from tide_export.errors import BundleError, GenerationError, ProviderError
from tide_export.runtime import providers
from tide_export.runtime.engine import load, open_engine
from tide_export.runtime.native import created
from tide_export.runtime.tensorrt import gpu
from tide_export.runtime.tensorrt import plans as on_tensorrt
from tide_export.runtime.tensorrt.flavours import (
    DAMAGED,
    REFUSALS,
    RTX_CAPABILITIES,
    TENSORRT,
    TENSORRT_RTX,
    built_for,
    check_header,
)
from tide_export.runtime.tensorrt.plans import pick_profile


@pytest.fixture(scope="module")
def built(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle with files in the place of engines, which no test here lets TensorRT see."""
    return with_engines(demo_bundle, tmp_path_factory.mktemp("providers") / "bundle")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Makes this a machine with a GPU of a compute capability and a version of TensorRT."""

    def be(device: tuple[int, int] | None, version: str = "11.1.0.106") -> None:
        library = SimpleNamespace(__version__=version)
        monkeypatch.setattr(on_tensorrt, "import_library", lambda flavour: library)
        monkeypatch.setattr(on_tensorrt, "compute_capability", lambda gpu=0: device)
        monkeypatch.setattr(providers, "compute_capability", lambda: device)
        monkeypatch.setattr(on_tensorrt, "select_gpu", lambda gpu: None)

    return be


def changed(built: Path, **changes) -> Bundle:
    opened = open_bundle(built, verify=False)
    assert opened.manifest.engines is not None
    return replace(opened, manifest=replace(opened.manifest, engines=replace(opened.manifest.engines, **changes)))


def test_a_folder_without_graphs_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BundleError, match=f"cannot read the graph '{re.escape(str(path))}/batch/head.onnx'"):
            open_engine(open_bundle(tiny_bundle), "cpu", graphs=path)


def test_an_unknown_provider_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(ProviderError, match="must be one of auto, cpu, cuda, tensorrt, tensorrt-rtx, not 'abacus'"):
        load(tiny_bundle, provider="abacus")


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        ("cuda", "holds no segment networks for provider 'cuda': export it with --target cuda"),
        ("tensorrt", "holds no networks for provider 'tensorrt': export it with --target tensorrt"),
        ("tensorrt-rtx", "holds no networks for provider 'tensorrt-rtx': export it with --target tensorrt-rtx"),
    ],
)
def test_a_provider_the_bundle_has_nothing_for_is_refused(tiny_bundle: Path, provider: str, says: str) -> None:
    with pytest.raises(ProviderError, match=says):
        load(tiny_bundle, provider=provider)


def test_engines_of_the_other_flavour_are_not_taken_instead(built: Path) -> None:
    with pytest.raises(ProviderError, match=r"are of TensorRT: use provider 'tensorrt', or build others"):
        load(built, provider="tensorrt-rtx", verify=False)


def test_without_tensorrt_the_package_is_named(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(ProviderError, match=r"pip install tensorrt, or -e '\.\[gpu\]' in the clone"):
        load(built, provider="tensorrt", verify=False)


def test_without_a_gpu_engines_are_refused(built: Path, machine) -> None:
    machine(None)
    with pytest.raises(ProviderError, match="TensorRT needs an NVIDIA GPU and its driver, and there is none here"):
        load(built, provider="tensorrt", verify=False)


def test_engines_of_another_version_are_refused(built: Path, machine) -> None:
    machine((8, 9), "11.2.0.1")
    with pytest.raises(ProviderError, match=r"built by TensorRT 11\.1\.0\.106 and run on no other, but 11\.2\.0\.1 is"):
        load(built, provider="tensorrt", verify=False)


def test_engines_for_another_gpu_are_refused(built: Path, machine) -> None:
    machine((9, 0))
    with pytest.raises(
        ProviderError, match=r"built for GPUs of compute capability 8\.9, this one has 9\.0: build them"
    ):
        load(built, provider="tensorrt", verify=False)


def test_engines_of_another_model_are_refused(built: Path, machine) -> None:
    machine((8, 9))
    with pytest.raises(BundleError, match="were built from other weights than its model's"):
        on_tensorrt.open_plans(changed(built, weights_sha256="0" * 64), "tensorrt", {})


def test_a_truncated_engine_is_refused_before_tensorrt_sees_it(built: Path, machine, tmp_path: Path, capsys) -> None:
    machine((8, 9))
    bundle = tmp_path / "bundle"
    shutil.copytree(built, bundle)
    engine = bundle / plan_file("segment_01")
    engine.write_bytes(engine.read_bytes()[:-1])
    arguments = ["generate", str(bundle), "--prompt", "a", "--provider", "tensorrt", "--no-verify", "-q"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "engines/segment_01.engine' is truncated: 5999 of 6000 bytes" in line


def test_an_engine_tensorrt_cannot_read_is_refused_with_its_last_words(built: Path, monkeypatch) -> None:
    class Logger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    class Runtime:
        def __init__(self, log) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> None:
            self.log.log(3, "loading")
            self.log.log(1, "magic tag\n does not match")

    runtime = on_tensorrt._Runtime(TENSORRT, SimpleNamespace(ILogger=Logger, Runtime=Runtime))
    Logger.__init__ = lambda self: None
    with pytest.raises(BundleError, match=r"cannot load plan 'x\.engine': magic tag does not match"):
        runtime.load(b"", "x.engine")


def test_tensorrt_for_rtx_says_what_is_wrong_with_a_header() -> None:
    """The library itself: damage it knows without a GPU. What else it may say is played, under the names it has."""
    library = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    with pytest.raises(BundleError, match=r"RTX cannot run plan 'x\.engine': it is no plan, or a damaged one$"):
        on_tensorrt._Runtime(TENSORRT_RTX, library).load(b"no engine " * 100, "x.engine")
    flags = library.EngineInvalidityDiagnostics.__members__
    assert set(flags) == {*REFUSALS, DAMAGED}

    def load(validity, *diagnostics: str) -> None:
        answer = validity, sum(int(flags[name]) for name in diagnostics)
        runtime = SimpleNamespace(get_engine_validity=lambda header: answer, engine_header_size=8)
        check_header(TENSORRT_RTX, library, runtime, b"12345678 and more", "x.engine", ["the last word"])

    for name, reason in REFUSALS.items():
        with pytest.raises(ProviderError, match=re.escape(f"'x.engine': {reason}")):
            load(library.EngineValidity.INVALID, name)
    with pytest.raises(ProviderError, match=r"another version: build it again; the GPU's driver is too old"):
        load(library.EngineValidity.INVALID, "VERSION_MISMATCH", "OLD_CUDA_DRIVER")
    with pytest.raises(ProviderError, match=r"the last word$"):
        load(library.EngineValidity.INVALID)
    load(library.EngineValidity.VALID)


def test_an_engine_that_is_not_at_its_best_runs_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    library = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    answer = library.EngineValidity.SUBOPTIMAL, 0
    runtime = SimpleNamespace(get_engine_validity=lambda header: answer, engine_header_size=8)
    with caplog.at_level("WARNING", "tide_export"):
        check_header(TENSORRT_RTX, library, runtime, b"engine", "x.engine", [])
    assert "plan 'x.engine' was built for other GPUs too" in caplog.text


def test_a_run_beyond_every_profile_is_refused() -> None:
    assert [pick_profile(PROFILES, tokens) for tokens in (1, 2, 32, 33, 1024)] == [0, 1, 1, 2, 2]
    with pytest.raises(GenerationError, match="a run over 1025 tokens exceeds the plan's profiles, which take 1024"):
        pick_profile(PROFILES, 1025)


def test_auto_falls_back_to_the_cpu_and_says_why_once(built: Path, machine, caplog: pytest.LogCaptureFixture) -> None:
    machine((9, 0))
    with caplog.at_level(logging.INFO, logger="tide_export"):
        assert load(built, threads=1, verify=False).provider == "cpu"
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("not running on tensorrt: ")
    assert "this one has 9.0" in messages[0]
    assert "with ONNX Runtime" in messages[1]
    assert len(messages) == 2


def test_auto_takes_engines_that_run_here(built: Path, machine, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    machine((8, 9))
    opened = []

    def open_plans(bundle: Bundle, provider: str, options: dict, plugins: None) -> c_void_p:
        opened.append(provider)
        return created("load", str(built).encode(), json.dumps(options | {"provider": "cpu"}).encode())

    monkeypatch.setattr(providers, "open_plans", open_plans)
    with caplog.at_level(logging.INFO, logger="tide_export"):
        load(built, verify=False)
    assert opened == ["tensorrt"]
    (record,) = caplog.records
    assert record.getMessage().endswith("with TensorRT")


def test_auto_does_not_hide_a_damaged_bundle(built: Path, machine, tmp_path: Path) -> None:
    machine((8, 9))
    with pytest.raises(BundleError, match="other weights"):
        open_engine(changed(built, weights_sha256="0" * 64))


def for_cuda(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle whose manifest says that its networks are for CUDA."""
    return with_manifest(bundle, folder, targets=("onnxruntime", "cuda"))


def test_cuda_without_its_package_is_one_line(demo_bundle: Path, tmp_path: Path, capsys) -> None:
    bundle = for_cuda(demo_bundle, tmp_path)
    assert main(["generate", str(bundle), "--prompt", "a", "--provider", "cuda", "-q"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "no CUDAExecutionProvider: pip uninstall onnxruntime, then pip install -e '.[cuda]' in the clone; or use"
        in line
    )
    assert "provider 'cpu'" in line


def test_networks_of_tensorrt_are_not_run_on_cuda(demo_bundle: Path, machine) -> None:
    machine((9, 0))
    with pytest.raises(ProviderError, match="networks for provider 'cuda': export it with --target cuda"):
        load(demo_bundle, provider="cuda", verify=False)
    assert load(demo_bundle, threads=1, verify=False).provider == "cpu"


def test_auto_tries_networks_for_cuda(demo_bundle: Path, machine, tmp_path: Path, caplog) -> None:
    machine((9, 0))
    with caplog.at_level(logging.INFO, logger="tide_export"):
        assert load(for_cuda(demo_bundle, tmp_path), threads=1, verify=False).provider == "cpu"
    assert "not running on cuda: this ONNX Runtime has no CUDAExecutionProvider" in caplog.records[0].getMessage()


def test_a_network_unlike_its_manifest_is_refused(demo_bundle: Path, tmp_path: Path) -> None:
    networks = open_bundle(demo_bundle, verify=False).manifest.networks
    assert networks is not None
    other = with_manifest(demo_bundle, tmp_path, networks=replace(networks, exit_size=64))
    says = r"segment_00.onnx': input exit_states is float32 \['batch', 1, 1280, 128\], but its man"
    with pytest.raises(BundleError, match=says):
        open_engine(open_bundle(other, verify=False), "cpu-networks", threads=1)
    half = with_manifest(demo_bundle, tmp_path, networks=replace(networks, weights="bf16", embedding=None))
    with pytest.raises(ProviderError, match="are bfloat16, which ONNX Runtime does not run on the CPU"):
        open_engine(open_bundle(half, verify=False), "cpu-networks", threads=1)


@pytest.mark.parametrize("listed", [(), RTX_CAPABILITIES])
@pytest.mark.parametrize("device", [(7, 5), (8, 7), (9, 0), (10, 0)])
def test_rtx_engines_are_refused_on_gpus_that_rtx_does_not_know(built: Path, machine, listed, device) -> None:
    """Hopper and data center Blackwell are newer than 8.0, and still none of its GPUs."""
    machine(device)
    bundle = changed(built, flavour="tensorrt-rtx", compute_capabilities=listed)
    here = f"{device[0]}\\.{device[1]}"
    sentence = rf"8\.0, 8\.6, 8\.9, 12\.0, 12\.1, this one has {here}: build others with .*-target tensorrt`"
    with pytest.raises(ProviderError, match=sentence):
        on_tensorrt.open_plans(bundle, "tensorrt-rtx", {})


def test_tensorrt_builds_for_the_gpu_there_is_and_rtx_for_all_it_knows() -> None:
    assert built_for(TENSORRT, (9, 0)) == ("9.0",)
    assert built_for(TENSORRT_RTX, (9, 0)) == built_for(TENSORRT_RTX, None) == RTX_CAPABILITIES
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    known = [name[2:-1] + "." + name[-1] for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    assert tuple(known) == ("7.5", *RTX_CAPABILITIES), "7.5 has to be asked for when engines are built"


def test_the_driver_is_asked_for_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {75: 9, 76: 0}

    def tell(number, attribute: int, device) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = answers.get(attribute, 7)
        return 0 if attribute in answers else 1

    driver = SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetAttribute=tell)
    monkeypatch.setattr(gpu, "_driver", lambda: driver)
    gpu.compute_capability.cache_clear()
    try:
        assert gpu.compute_capability() == (9, 0)
        gpu.compute_capability.cache_clear()
        del answers[76]
        assert gpu.compute_capability() is None
    finally:
        gpu.compute_capability.cache_clear()
