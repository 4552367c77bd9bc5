"""What TensorRT for RTX alone has, in the C++ runtime built with its headers, on stand-ins for it and CUDA: engines'
headers, kept kernels, and contexts that cannot be recorded. Needs TENSORRT_RTX_ROOT; without it all tests here are
skipped."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cpp_builds import CppBuild, TensorrtBuild
from cpp_engine import CppEngine, facts
from engine_files import PROFILES, changed, write_engines

from tide_export import names
from tide_export.bundle.engine_fields import EnginesInfo
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, ProviderError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tensorrt.flavours import DAMAGED, REFUSALS, RTX_CAPABILITIES

BITS = {  # of EngineInvalidityDiagnostics
    **{"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4, "OLD_CUDA_RUNTIME": 8},
    **{"INSUFFICIENT_GPU_MEMORY": 16, DAMAGED: 32, "CUDA_ERROR": 64},
}


@pytest.fixture(scope="module")
def rtx(cpp: CppBuild) -> TensorrtBuild:
    return cpp.with_tensorrt("tensorrt-rtx")


@pytest.fixture
def bundle(rtx: TensorrtBuild, demo_bundle: Path, tmp_path: Path) -> Path:
    """The demo bundle with engines that the stand-in for TensorRT for RTX reads."""
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    manifest = open_bundle(bundle, verify=False).manifest
    engines = EnginesInfo("tensorrt-rtx", rtx.version, (), manifest.model.weights_sha256, PROFILES, 12.5)
    write_engines(bundle, replace(manifest, engines=engines))
    return bundle


@pytest.fixture
def opens(rtx: TensorrtBuild, tmp_path: Path) -> Callable[..., CppEngine]:
    def opens(bundle: Path, provider: str = "tensorrt-rtx", **environment: str) -> CppEngine:
        environment |= {"LD_LIBRARY_PATH": str(rtx.libraries), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        options: dict[str, Any] = {"threads": None, "verify": False, "provider": provider}
        return CppEngine(rtx.driver, bundle, environment=environment, **options)

    return opens


@pytest.fixture(scope="module")
def python(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


def test_engines_give_python_s_tokens(opens, bundle: Path, python: Engine, demo_text_ids: list[int]) -> None:
    engine = opens(bundle)
    for options in ({"mode": "full"}, {"threshold": 0.6}, {"mode": "lossless", "threshold": 0.5}):
        ids = demo_text_ids[300:340]
        cpp, other = (one.generate(ids, max_new_tokens=32, stop_token_ids=[], **options) for one in (engine, python))
        assert facts(cpp) == facts(other)
    assert engine.call("gpu_graphs")[1] > 20
    engine.close()


def with_header(bundle: Path, header: str) -> None:
    """Gives the engine of segment 1 another header."""
    manifest, file = open_bundle(bundle, verify=False).manifest, bundle / names.engine_file("segment_01")
    lines = file.read_text().splitlines()[1:] if header else []
    file.write_text("\n".join([header, *lines]))
    write_manifest(bundle, manifest)


def test_headers_are_refused_with_python_s_sentences(opens, bundle: Path) -> None:
    assert set(BITS) == {*REFUSALS, DAMAGED}
    engine = r"TensorRT for RTX cannot run engine '.*segment_01\.engine': "
    for diagnostics in ([], ["VERSION_MISMATCH", "OLD_CUDA_DRIVER"], *([name] for name in REFUSALS)):
        with_header(bundle, f"an invalid engine {sum(BITS[name] for name in diagnostics)}")
        sentence = "; ".join(REFUSALS[name] for name in diagnostics) or "the last word"
        with pytest.raises(ProviderError, match=f"{engine}{sentence.replace('?', '[?]')}$"):
            opens(bundle)
    other = opens(bundle, "auto")
    assert other.log == [
        f"running '{bundle}' with ONNX Runtime on the CPU, not with tensorrt-rtx: TensorRT for RTX cannot run engine "
        f"'{bundle / names.engine_file('segment_01')}': {sentence}, not with cuda: this ONNX Runtime has no "
        "CUDAExecutionProvider: link its release for GPUs, or use provider 'cpu'"
    ]
    other.close()


def test_damaged_headers_are_errors_of_the_bundle(opens, bundle: Path) -> None:
    with_header(bundle, f"an invalid engine {BITS[DAMAGED] | BITS['VERSION_MISMATCH']}")
    sentence = "segment_01.engine': it is no engine, or a damaged one; it was built by another version: build it again$"
    for provider in ("tensorrt-rtx", "auto"):  # which does not hide a damaged bundle
        with pytest.raises(BundleError, match=sentence):
            opens(bundle, provider)
    with_header(bundle, "")
    with pytest.raises(BundleError, match=r"segment_01\.engine': it is no engine, or a damaged one$"):
        opens(bundle)


def test_engines_for_other_gpus_too_run_with_a_sentence(opens, bundle: Path) -> None:
    with_header(bundle, "a slow engine")
    engine = opens(bundle, "auto")
    path = bundle / names.engine_file("segment_01")
    assert engine.log == [
        f"engine '{path}' was built for other GPUs too: built on this one, it may be faster",
        f"running '{bundle}' with TensorRT for RTX",
    ]
    engine.start([0.5] * 3).step([1, 2, 3])
    engine.close()


def kernels(tmp_path: Path, rtx: TensorrtBuild) -> Path:
    return tmp_path / "cache" / "tide_export" / f"tensorrt-rtx-{rtx.version}-Fake-GPU-8.9.kernels"


def test_kernels_are_shared_by_contexts_saved_and_read_again(opens, bundle: Path, rtx, tmp_path: Path) -> None:
    file = kernels(tmp_path, rtx)
    engine = opens(bundle, "auto")
    for _ in range(2):  # several sets of buffers
        engine.start([2.0] * 3).step([1, 2, 3])
    assert not file.exists()
    engine.close()
    version, *kept = file.read_text().splitlines()
    assert len({kernel.split()[0] for kernel in kept}) >= 5, "all segments and the head"
    assert [found.name for found in file.parent.glob("*.kernels*")] == [file.name]
    written = file.stat().st_mtime_ns
    engine = opens(bundle, "auto")
    assert engine.log == [f"running '{bundle}' with TensorRT for RTX"]
    engine.start([2.0] * 3).step([1, 2, 3])
    engine.close()
    assert file.stat().st_mtime_ns == written, "nothing new was compiled"
    engine = opens(bundle)
    engine.start([2.0] * 3).step([*range(40)])
    engine.close()
    assert file.read_text().splitlines()[0] == version
    assert {*kept} < {*file.read_text().splitlines()[1:]}


def test_kernels_of_another_version_are_compiled_again_with_a_sentence(opens, bundle: Path, rtx, tmp_path) -> None:
    file = kernels(tmp_path, rtx)
    file.parent.mkdir(parents=True)
    file.write_text("1 0\nolder\n")
    engine = opens(bundle, "auto")
    assert engine.log[0] == (
        f"the kernels in '{file}' are damaged, or of another GPU, driver or version: they are compiled again"
    )
    engine.start([2.0] * 3).step([1, 2, 3])
    engine.close()
    assert "older" not in file.read_text()
    assert file.read_text().count("\n") > 5


def test_a_cache_that_cannot_be_saved_is_not_worth_an_error(opens, bundle: Path, rtx, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    engine = opens(bundle)
    engine.start([2.0] * 3).step([1, 2, 3])
    engine.close()
    assert (tmp_path / "cache").is_file()


def test_runs_that_rtx_cannot_record_are_queued(opens, bundle: Path, python: Engine, demo_text_ids, capfd) -> None:
    engine = opens(bundle, FAKE_TRT_RECORDS_NOT="1")
    ids = demo_text_ids[300:340]
    answers = [one.generate(ids, max_new_tokens=32, stop_token_ids=[], threshold=0.6) for one in (engine, python)]
    assert facts(answers[0]) == facts(answers[1])
    assert engine.call("gpu_graphs") == [0, 0]
    engine.close()
    assert capfd.readouterr().err.count("TensorRT for RTX cannot record runs of ") == 1


def test_hopper_is_refused_by_name(opens, bundle: Path) -> None:
    changed(bundle, compute_capabilities=("8.0", "8.6"))
    with pytest.raises(ProviderError, match=r"of compute capability 8\.0, 8\.6, this one has 8\.9: build them again"):
        opens(bundle)
    assert "9.0" not in RTX_CAPABILITIES
    hopper = r"compute capability .*, this one has 9\.0: build others with `tide-export build .* --target tensorrt`"
    with pytest.raises(ProviderError, match=hopper):
        opens(bundle, FAKE_CUDA_CAPABILITY="9.0")
