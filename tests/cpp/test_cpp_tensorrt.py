"""The C++ runtime built with TensorRT's public headers, on stand-ins for TensorRT and CUDA: engines are loaded, checked
and run as on a GPU. Needs TENSORRT_ROOT; without it all tests here are skipped."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_builds import CppBuild, TensorrtBuild
from cpp_engine import CppEngine, facts
from engine_files import PROFILES, changed, write_engines

from tide_export import names
from tide_export.bundle.engine_fields import EnginesInfo, PluginsInfo
from tide_export.bundle.opened import open_bundle
from tide_export.errors import BundleError, GenerationError, ProviderError, TideError
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.version import __version__


@pytest.fixture(scope="module")
def tensorrt(cpp: CppBuild) -> TensorrtBuild:
    return cpp.with_tensorrt()


@pytest.fixture(scope="module")
def bundle(tensorrt: TensorrtBuild, demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle with engines that the stand-in for TensorRT reads."""
    bundle = tmp_path_factory.mktemp("engines") / "bundle"
    shutil.copytree(demo_bundle, bundle)
    manifest = open_bundle(bundle, verify=False).manifest
    engines = EnginesInfo("tensorrt", tensorrt.version, ("8.9",), manifest.model.weights_sha256, PROFILES, 12.5)
    write_engines(bundle, replace(manifest, engines=engines))
    return bundle


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture(scope="module")
def opens(tensorrt: TensorrtBuild) -> Callable[..., CppEngine]:
    def opens(bundle: Path, provider: str = "tensorrt", **options: Any) -> CppEngine:
        environment = {"LD_LIBRARY_PATH": str(tensorrt.libraries)}
        defaults = {"threads": None, "verify": False, "environment": environment, "provider": provider} | options
        return CppEngine(tensorrt.driver, bundle, **defaults)

    return opens


@pytest.fixture(scope="module")
def engine(opens: Callable[..., CppEngine], bundle: Path) -> Iterator[CppEngine]:
    opened = opens(bundle)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def python(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"threshold": 0.5, "max_pending": 1},
        {"threshold": 0.6},
        {"mode": "lossless", "threshold": 0.5},
    ],
    ids=["full", "exit, 1 waits", "exit", "lossless"],
)
@pytest.mark.parametrize("length", [1, 40, 200])
def test_engines_give_python_s_tokens(engine: CppEngine, python: Engine, demo_text_ids, length: int, options) -> None:
    ids = demo_text_ids[300 : 300 + length]
    cpp, other = (one.generate(ids, max_new_tokens=32, stop_token_ids=[], **options) for one in (engine, python))
    assert facts(cpp) == facts(other)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "exit", "threshold": 0.5, "max_pending": 4},
        {"mode": "exit", "threshold": 0.6, "compaction_threshold": 0.0},
        {"mode": "lossless", "threshold": 0.5},
    ],
    ids=["full", "exit", "exit, all catch up", "lossless"],
)
def test_lists_get_the_tokens_of_each_prompt_alone(engine: CppEngine, python: Engine, demo_text_ids, options) -> None:
    """More prompts than the engines take at once, in every profile."""
    prompts = [demo_text_ids[60 * n : 60 * n + length] for n, length in enumerate((1, 40, 100, 2, 33, 5, 64, 9, 3, 1))]
    assert engine.max_batch_size == 8
    found = engine.generate_batch(prompts, max_new_tokens=16, stop_token_ids=[], **options)
    of_one = {name: value for name, value in options.items() if name != "compaction_threshold"}
    for ids, one in zip(prompts, found, strict=True):
        alone = python.generate(ids, max_new_tokens=16, stop_token_ids=[], **of_one)
        assert (one.tokens, one.finish_reason) == (alone.tokens, alone.finish_reason)
        if options["mode"] != "lossless":  # when drafts are verified depends on the others
            assert one.stats.exit_layer == alone.stats.exit_layer


def test_steps_of_every_profile_are_the_branched_graph_s(engine: CppEngine, python: Engine, demo_text_ids) -> None:
    graph, engines, at = python.start([0.5] * 3, 8), engine.start([0.5] * 3, 8), 0
    for number, size in enumerate([1, 1, 1, 5, 1, 40, 1, 1, 1, 3, 1, 33, 1, 1, 1] * 2):
        ids, keep, full = demo_text_ids[at : at + size], 1 + number % 2 * 40, number % 5 == 4
        a, b = graph.step(ids, keep, full), engines.step(ids, keep, full)
        assert (b.exit_layer, b.segments_run) == (a.exit_layer, a.segments_run)
        np.testing.assert_allclose(b.logits, a.logits, atol=1e-3)
        at += size
    assert (engines.lengths, engines.pending) == (graph.lengths, graph.pending)
    assert engine.call("gpu_graphs")[1] > 20


def test_auto_takes_engines_and_says_so(opens, bundle: Path) -> None:
    engine = opens(bundle, provider="auto")
    assert engine.log == [f"running '{bundle}' with TensorRT"]
    engine.start([NEVER_EXIT] * 3).step([1, 2])
    assert engine.start([NEVER_EXIT] * 3).capacity == 1024
    engine.close()


def test_onnxruntime_without_cuda_is_named(opens, bundle: Path) -> None:
    sentence = "this ONNX Runtime has no CUDAExecutionProvider: link its release for GPUs, or use provider 'cpu'"
    with pytest.raises(ProviderError, match=sentence):
        opens(bundle, "cuda")


def test_each_thread_has_its_own_buffers(engine: CppEngine, python: Engine, demo_text_ids) -> None:
    ids = demo_text_ids[100:120]
    answers = engine.call("at_once", "4", *engine.request(ids, 12, threshold=0.6, stop_token_ids=[]))
    for omitted, answer in enumerate(answers):
        alone = python.generate(ids[: len(ids) - omitted], max_new_tokens=12, threshold=0.6, stop_token_ids=[])
        assert facts(engine.generation(answer)) == facts(alone)


@pytest.mark.parametrize(
    ("wrong", "profiles", "sentence"),
    [
        ("not in place", PROFILES, r"engine '.*segment_01\.engine' does not update past_key_values\.3\.key in place"),
        (
            "types",
            PROFILES,
            r"'.*segment_01\.engine': input exit_states is another type .*, but its manifest calls",
        ),
        ("", PROFILES[:4], r"engine '.*segment_00\.engine' has 4 optimization profiles, not the 5 of its manifest"),
        (
            "",
            (*PROFILES[:3], replace(PROFILES[3], batch_size=4), PROFILES[4]),
            r"segment_00\.engine' takes past_lengths of \[4\] at most in profile batch-decode, unlike its manifest",
        ),
    ],
)
def test_engines_unlike_their_manifest_are_refused(opens, copied: Path, wrong: str, profiles, sentence: str) -> None:
    write_engines(copied, open_bundle(copied, verify=False).manifest, wrong, profiles)
    for provider in ("tensorrt", "auto"):  # which does not hide a damaged bundle
        with pytest.raises(BundleError, match=sentence):
            opens(copied, provider)


def test_an_engine_that_lists_no_aliases_is_taken(opens, copied: Path) -> None:
    write_engines(copied, open_bundle(copied, verify=False).manifest, "no aliases listed")
    opened = opens(copied)
    opened.start([0.5] * 3).step([1, 2, 3])
    opened.close()


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        (
            {"version": "11.0.0.1"},
            ProviderError,
            r"built by TensorRT 11\.0\.0\.1 and run on no other, but [\d.]+ is",
        ),
        (
            {"compute_capabilities": ("9.0",)},
            ProviderError,
            r"of compute capability 9\.0, this one has 8\.9: build them",
        ),
        ({"flavour": "tensorrt-rtx"}, ProviderError, "are of TensorRT for RTX: use provider 'tensorrt-rtx', or build"),
    ],
)
def test_engines_for_another_machine_are_refused(opens, copied: Path, changes, kind: type[TideError], sentence) -> None:
    changed(copied, **changes)
    with pytest.raises(kind, match=sentence):
        opens(copied)
    engine = opens(copied, "auto")
    (line,) = engine.log
    assert "with ONNX Runtime on the CPU, not with" in line
    engine.close()
    if "flavour" in changes:
        with pytest.raises(
            ProviderError, match="was built with TensorRT's headers and runs its engines alone: build it"
        ):
            opens(copied, "tensorrt-rtx")


@pytest.mark.parametrize(
    ("driver", "sentence"),
    [
        ("0", "TensorRT needs an NVIDIA GPU and its driver, and there is none here"),
        ("12040", r"was built with CUDA \d+\.\d, and the GPU's driver here is for CUDA 12\.4: update the driver, or"),
    ],
)
def test_a_driver_that_is_missing_or_too_old(opens, tensorrt: TensorrtBuild, bundle: Path, driver, sentence) -> None:
    environment = {"LD_LIBRARY_PATH": str(tensorrt.libraries), "FAKE_CUDA_DRIVER": driver}
    with pytest.raises(ProviderError, match=sentence):
        opens(bundle, environment=environment)


def test_an_engine_that_cannot_be_read_and_memory_that_cannot_be_had(opens, copied: Path, bundle: Path) -> None:
    engine = copied / names.engine_file("head")
    engine.write_bytes(b"x" * engine.stat().st_size)
    with pytest.raises(BundleError, match=r"cannot load engine '.*head\.engine': magic tag does not match"):
        opens(copied)
    opened = opens(bundle)
    opened.call("gpu_memory", str(1 << 20))
    with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
        opened.start([0.5] * 3)
    opened.call("gpu_memory", str(1 << 30))
    opened.start([0.5] * 3).step([1, 2, 3])
    opened.close()


def test_engines_with_plugins_need_the_library(opens, copied: Path, tmp_path: Path, compile_library) -> None:
    changed(copied, plugins=PluginsInfo(__version__, "0" * 64, ("segment_00",)))
    for options, sentence in [
        (
            {},
            f"hold plugins of tide_export {__version__} and no plugin library is named here: name it as plugins or in",
        ),
        ({"plugins": "none"}, "no plugin library is named here"),
        (
            {"plugins": compile_library("older", tensorrt="10.3")},
            r"was compiled for TensorRT 10\.3 and [\d.]+ is installed: build",
        ),
        ({"plugins": compile_library("unloved")}, r"TensorRT cannot load the plugin library '.*unloved\.so'"),
    ]:
        with pytest.raises(ProviderError, match=sentence):
            opens(copied, **options)
    engine = opens(copied, "auto", plugins=compile_library("ours"))
    another, running = engine.log
    assert "ours.so' is another build than the engines of bundle" in another
    assert running.endswith("with TensorRT")
    engine.close()
    changed(copied, plugins=PluginsInfo("0.0.9", "0" * 64, ("segment_00",)))
    with pytest.raises(
        ProviderError, match=f"hold plugins of tide_export 0.0.9, but the library .* is of {__version__}"
    ):
        opens(copied, plugins=compile_library("ours"))


def test_a_machine_without_the_library_is_told_so(tensorrt: TensorrtBuild, bundle: Path) -> None:
    """The program as it is built for users, with CUDA's own runtime in it."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [tensorrt.program, bundle, "--ids", "1", "--max-new-tokens", "2", "--no-verify", *options]
        without = os.environ | {"LD_LIBRARY_PATH": ""}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=without)

    named, auto = run("--provider", "tensorrt"), run()
    sentence = "TensorRT cannot be loaded (libnvinfer.so."
    assert (named.returncode, named.stdout, named.stderr.count("\n")) == (2, "", 1)
    assert sentence in named.stderr
    assert auto.returncode == 0
    assert f"with ONNX Runtime on the CPU, not with tensorrt: {sentence}" in auto.stderr
