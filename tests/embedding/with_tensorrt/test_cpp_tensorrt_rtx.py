"""What TensorRT for RTX alone has, in the library built with its headers, on stand-ins for it and for CUDA: engines'
headers, kept kernels, and contexts that cannot be recorded. Needs TENSORRT_RTX_ROOT (trt_build)."""

from pathlib import Path
from typing import Any

import pytest
from fake_cudart import FakeCudart
from judge import TEXT
from plan_files import change, with_header
from trt_build import BUNDLE_ERROR, PROVIDER_ERROR, Build, Opens, refused

from tide_export.bundle.file_names import plan_file
from tide_export.names.networks import BEST, HEAD, segment_name
from tide_export.runtime.engine import Engine
from tide_export.runtime.tensorrt.flavours import DAMAGED, REFUSALS, RTX_CAPABILITIES

FLAVOUR = "tensorrt-rtx"
BITS = {  # of EngineInvalidityDiagnostics
    **{"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4, "OLD_CUDA_RUNTIME": 8},
    **{"INSUFFICIENT_GPU_MEMORY": 16, DAMAGED: 32, "CUDA_ERROR": 64},
}
TOKENS: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": []}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Build) -> Path:
    """The file that keeps them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tide_export" / f"tensorrt-rtx-{build.version}-Fake-GPU-8.9.kernels"


def test_engines_give_the_graph_s_tokens(
    opens: Opens, bundle: Path, graph: Engine, thresholds: list[float], cudart: FakeCudart
) -> None:
    engine, before = opens(bundle), cudart.calls("cudaGraphLaunch")
    for options in ({"mode": "full"}, {"threshold": thresholds}, {"mode": "lossless", "threshold": thresholds}):
        found, expected = (one.generate(TEXT, **TOKENS, **options) for one in (engine, graph))
        assert (found.tokens, found.stats.exit_layer) == (expected.tokens, expected.stats.exit_layer)
    assert cudart.calls("cudaGraphLaunch") - before > 50


def test_headers_are_refused_with_python_s_sentences(opens: Opens, bundle: Path, build: Build) -> None:
    assert set(BITS) == {*REFUSALS, DAMAGED}
    engine = r"TensorRT for RTX cannot run plan '.*segment_01\.engine': "
    for diagnostics in ([], ["VERSION_MISMATCH", "OLD_CUDA_DRIVER"], *([name] for name in REFUSALS)):
        with_header(bundle, f"an invalid engine {sum(BITS[name] for name in diagnostics)}")
        sentence = "; ".join(REFUSALS[name] for name in diagnostics) or "the last word"
        with refused(PROVIDER_ERROR, f"{engine}{sentence.replace('?', '[?]')}$"):
            opens(bundle)
    opens(bundle, "auto")
    path = bundle / plan_file(segment_name(1))
    (line,) = build.log
    assert line.startswith(
        f"running '{bundle}' with ONNX Runtime on the CPU, not with tensorrt-rtx: TensorRT for RTX cannot run plan "
        f"'{path}': {sentence}"
    )


def test_damaged_headers_are_errors_of_the_bundle(opens: Opens, bundle: Path) -> None:
    with_header(bundle, f"an invalid engine {BITS[DAMAGED] | BITS['VERSION_MISMATCH']}")
    sentence = "segment_01.engine': it is no plan, or a damaged one; it was built by another version: build it again$"
    for provider in ("tensorrt-rtx", "auto"):  # which does not hide a damaged bundle
        with refused(BUNDLE_ERROR, sentence):
            opens(bundle, provider)
    with_header(bundle, "")
    with refused(BUNDLE_ERROR, r"segment_01\.engine': it is no plan, or a damaged one$"):
        opens(bundle)


def test_engines_for_other_gpus_too_run_with_a_sentence(opens: Opens, bundle: Path, build: Build) -> None:
    with_header(bundle, "a slow engine")
    engine = opens(bundle, "auto")
    path = bundle / plan_file(segment_name(1))
    assert build.log == [
        f"plan '{path}' was built for other GPUs too: built on this one, it may be faster",
        f"running '{bundle}' with TensorRT for RTX",
    ]
    assert len(engine.generate(TEXT, **TOKENS).tokens) == 24


def test_kernels_are_shared_by_contexts_saved_and_read_again(
    build: Build, opens: Opens, bundle: Path, kernels: Path
) -> None:
    def generated(prompt: list[int]) -> None:
        """By an engine that is closed then, twice."""
        engine = opens(bundle, "auto")
        assert build.log == [f"running '{bundle}' with TensorRT for RTX"]
        for _ in range(2):
            engine.generate(prompt, mode="full", max_new_tokens=2)
        before = kernels.exists()
        engine.close()
        engine.handle.value = None
        assert kernels.exists() or not before

    generated(TEXT[:3])
    version, *kept = kernels.read_text().splitlines()
    assert {kernel.split()[0] for kernel in kept} == {*(segment_name(k) for k in range(3)), HEAD, BEST}
    assert [found.name for found in kernels.parent.iterdir()] == [kernels.name]
    written = kernels.stat().st_mtime_ns
    generated(TEXT[:3])
    assert kernels.stat().st_mtime_ns == written, "nothing new was compiled"
    generated(TEXT)
    assert kernels.read_text().splitlines()[0] == version
    assert {*kept} < {*kernels.read_text().splitlines()[1:]}


def test_kernels_of_another_version_are_compiled_again_with_a_sentence(
    opens: Opens, bundle: Path, build: Build, kernels: Path
) -> None:
    kernels.parent.mkdir(parents=True)
    kernels.write_text("0\nolder\n")
    engine = opens(bundle, "auto")
    assert build.log[0] == (
        f"the kernels in '{kernels}' are damaged, or of another GPU, driver or version: they are compiled again"
    )
    engine.generate(TEXT, **TOKENS)
    engine.close()
    engine.handle.value = None
    assert "older" not in kernels.read_text()
    assert kernels.read_text().count("\n") > 5


def test_a_cache_that_cannot_be_saved_is_not_worth_an_error(opens: Opens, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    engine = opens(bundle)
    engine.generate(TEXT, **TOKENS)
    engine.close()
    engine.handle.value = None
    assert (tmp_path / "cache").is_file()


def test_runs_that_rtx_cannot_record_are_queued(
    opens: Opens,
    bundle: Path,
    graph: Engine,
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With one warning in the process."""
    monkeypatch.setenv("FAKE_TRT_RECORDS_NOT", "1")
    before = cudart.calls("cudaGraphLaunch")
    for _ in range(2):
        engine = opens(bundle)
        assert engine.generate(TEXT, **TOKENS).tokens == graph.generate(TEXT, **TOKENS).tokens
    assert cudart.calls("cudaGraphLaunch") == before
    assert capfd.readouterr().err.count("TensorRT for RTX cannot record runs of ") == 1


def test_hopper_is_refused_by_name(opens: Opens, bundle: Path, cudart: FakeCudart) -> None:
    change(bundle, compute_capabilities=("8.0", "8.6"))
    with refused(PROVIDER_ERROR, r"of compute capability 8\.0, 8\.6, this one has 8\.9: build them again"):
        opens(bundle)
    assert "9.0" not in RTX_CAPABILITIES
    cudart.capability = 90
    hopper = r"compute capability .*, this one has 9\.0: build others with `tide-export build .* --target tensorrt`"
    with refused(PROVIDER_ERROR, hopper):
        opens(bundle)
