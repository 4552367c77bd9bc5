"""TensorRT's engines in the library built with its headers, on stand-ins for TensorRT and CUDA: loaded, checked and run
as on a GPU. Needs TENSORRT_ROOT (trt_build)."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from caller_networks import CallersNetworks
from drafters import drafting_copy
from fake_cudart import FakeCudart
from judge import TEXT
from plan_files import change, with_engines, write_engine
from tiny_engines import MAX_BATCH_SIZE, TinyLlama
from trt_build import (
    BUNDLE_ERROR,
    GENERATION_ERROR,
    PROVIDER_ERROR,
    Build,
    Opens,
    refused,
)

from tide_export.bundle.file_names import plan_file
from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import PluginsInfo
from tide_export.bundle.profiles import profiles_for
from tide_export.bundle.store import write_manifest
from tide_export.common.version import __version__
from tide_export.names.networks import DRAFTER, HEAD
from tide_export.runtime.engine import Engine

FLAVOUR = "tensorrt"
PROMPTS = [TEXT[:1], TEXT[:3] * 2, TEXT, [*TEXT, *TEXT[::-1]]]  # for every profile, and in parts
OPTIONS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "exit", "max_pending": 1},
    {"mode": "exit", "max_pending": 16},
    {"mode": "lossless"},
    {"mode": "exit", "temperature": 0.8, "top_k": 5, "seed": 3},
]


@pytest.fixture(scope="module")
def plugins(compile_library: Callable[..., Path]) -> Path:
    """A stand-in for the plugin library: the one that this process loads."""
    return compile_library("ours")


def chosen(options: dict[str, Any], thresholds: list[float]) -> dict[str, Any]:
    exits = {} if options["mode"] == "full" else {"threshold": thresholds}
    exits |= {"min_layers": 0} if options["mode"] == "exit" else {}
    return {"max_new_tokens": 24, "stop_token_ids": []} | options | exits


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_engines_give_the_graph_s_tokens(
    opens: Opens, bundle: Path, graph: Engine, thresholds: list[float], cudart: FakeCudart, options: dict[str, Any]
) -> None:
    engine, given, before = opens(bundle), chosen(options, thresholds), cudart.calls("cudaGraphLaunch")
    for prompt in PROMPTS:
        found, expected = engine.generate(prompt, **given), graph.generate(prompt, **given)
        assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
        for name in ("exit_layer", "layers_run", "layer_tokens_run", "drafted", "accepted"):
            assert getattr(found.stats, name) == getattr(expected.stats, name)
    assert cudart.calls("cudaGraphLaunch") - before > 30


def test_the_engine_of_a_drafter_drafts(
    build: Build, opens: Opens, bundle: Path, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """Where `tide-export build` has made one; without it nothing is drafted."""
    drafting = drafting_copy(bundle, tmp_path)
    build.run_networks(CallersNetworks(open_bundle(drafting)))
    free = Drafting((1.0, 1.0), 0, 0, (1.0, 1.0), (0.0,) * 5, {}, 4, 0.0)
    manifest = open_bundle(drafting).manifest
    for has_engine in (False, True):
        if has_engine:
            write_engine(drafting, DRAFTER)
        write_manifest(drafting, replace(manifest, drafting=free))
        engine = opens(drafting)
        for prompt in PROMPTS[:3]:
            options: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": [], "temperature": 0.7, "seed": 1}
            full = engine.generate(prompt, mode="full", **options)
            found = engine.generate(prompt, mode="lossless", **options)
            assert found.tokens == full.tokens
            assert (found.stats.learned_drafted > 0) == has_engine
    build.run_networks(CallersNetworks(open_bundle(tiny_llama.exact)))  # which the other tests' engines compute


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_requests_get_the_tokens_of_each_prompt_alone(
    opens: Opens, bundle: Path, graph: Engine, thresholds: list[float], options: dict[str, Any], share: float
) -> None:
    """More of them than the engines take at once, in every profile."""
    engine, given = opens(bundle), chosen(options, thresholds)
    scheduler = engine.scheduler(slots=MAX_BATCH_SIZE, compaction_threshold=share)
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    requests = [scheduler.submit(prompt, **given) for prompt in prompts]
    scheduler.start()
    for request, prompt in zip(requests, prompts, strict=True):
        found, expected = request.result(), graph.generate(prompt, **given)
        request.close()
        assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
        if options["mode"] != "lossless":  # when drafts are verified depends on the others
            assert found.stats.exit_layer == expected.stats.exit_layer
    scheduler.close()


def test_auto_takes_engines_and_says_so(opens: Opens, bundle: Path, build: Build) -> None:
    opens(bundle, "auto")
    assert build.log == [f"running '{bundle}' with TensorRT"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("not in place", r"plan '.*segment_01\.engine' does not update past_key_values\.1\.key in place"),
        ("types", r"'.*segment_01\.engine': input exit_states is another type .*, but its manifest calls"),
        ("fewer", r"plan '.*segment_00\.engine' has 4 optimization profiles, not the 5 of its manifest"),
        ("wider", r"segment_00\.engine' takes past_lengths of \[4\] at most in profile batch-decode, unlike its manif"),
    ],
)
def test_engines_unlike_their_manifest_are_refused(
    opens: Opens, build: Build, tiny_llama: TinyLlama, tmp_path: Path, wrong: str, sentence: str
) -> None:
    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    *single, decode, catch_up = profiles_for(info)
    profiles = {
        "fewer": (*single, decode),
        "wider": (*single, replace(decode, batch_size=MAX_BATCH_SIZE + 1), catch_up),
    }.get(wrong)
    bundle = with_engines(tiny_llama.exact, tmp_path / "bundle", FLAVOUR, build.version, wrong, profiles)
    for provider in ("tensorrt", "auto"):  # which does not hide a damaged bundle
        with refused(BUNDLE_ERROR, sentence):
            opens(bundle, provider)


def test_an_engine_that_lists_no_aliases_is_taken(
    opens: Opens, build: Build, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    bundle = with_engines(tiny_llama.exact, tmp_path / "bundle", FLAVOUR, build.version, "no aliases listed")
    assert len(opens(bundle).generate([1, 2, 3], max_new_tokens=2, stop_token_ids=[]).tokens) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": "11.0.0.1"}, r"built by TensorRT 11\.0\.0\.1 and run on no other, but [\d.]+ is"),
        ({"compute_capabilities": ("9.0",)}, r"of compute capability 9\.0, this one has 8\.9: build them"),
        ({"flavour": "tensorrt-rtx"}, "are of TensorRT for RTX: use provider 'tensorrt-rtx', or build"),
    ],
)
def test_engines_for_another_machine_are_refused(
    opens: Opens, bundle: Path, build: Build, changes: dict[str, Any], sentence: str
) -> None:
    change(bundle, **changes)
    with refused(PROVIDER_ERROR, sentence):
        opens(bundle)
    opens(bundle, "auto")
    assert "with ONNX Runtime on the CPU, not with" in build.log[-1]
    if "flavour" in changes:
        with refused(PROVIDER_ERROR, "was built with TensorRT's headers and runs its plans alone: build it"):
            opens(bundle, "tensorrt-rtx")


@pytest.mark.parametrize(
    ("driver", "sentence"),
    [
        (0, "TensorRT needs an NVIDIA GPU and its driver, and there is none here"),
        (12040, r"the CUDA runtime here is 13\.0, and the GPU's driver is for CUDA 12\.4: update the driver, or"),
    ],
)
def test_a_driver_that_is_missing_or_too_old(
    opens: Opens, bundle: Path, cudart: FakeCudart, driver: int, sentence: str
) -> None:
    cudart.driver = driver
    with refused(PROVIDER_ERROR, sentence):
        opens(bundle)


def test_the_number_of_a_gpu(opens: Opens, bundle: Path, graph: Engine, cudart: FakeCudart) -> None:
    cudart.devices, cudart.only, full = 2, 1, {"mode": "full", "stop_token_ids": []}
    assert opens(bundle, device=1).generate(TEXT, **full).tokens == graph.generate(TEXT, **full).tokens
    with refused(PROVIDER_ERROR, "there is no GPU 2: CUDA finds 2, numbered from 0"):
        opens(bundle, device=2)


def test_an_engine_that_cannot_be_read_and_memory_that_cannot_be_had(
    opens: Opens, bundle: Path, cudart: FakeCudart
) -> None:
    engine = opens(bundle)
    cudart.limit = cudart.allocated + (1 << 18)
    with refused(GENERATION_ERROR, "the GPU has not enough free memory for the sequence's buffers"):
        engine.generate(TEXT)
    cudart.reset()
    assert engine.generate(TEXT, max_new_tokens=2, stop_token_ids=[]).tokens
    file = bundle / plan_file(HEAD)
    file.write_bytes(b"x" * file.stat().st_size)
    with refused(BUNDLE_ERROR, r"cannot load plan '.*head\.engine': magic tag does not match"):
        opens(bundle)


def test_engines_with_plugins_need_the_library(
    opens: Opens, bundle: Path, build: Build, plugins: Path, compile_library: Callable[..., Path]
) -> None:
    change(bundle, plugins=PluginsInfo(__version__, "0" * 64, ("segment_00",)))
    older, unloved = compile_library("older", tensorrt="10.3"), compile_library("unloved")
    for options, sentence in [
        (
            {},
            f"hold plugins of tide_export {__version__} and no plugin library is named here: name it as plugins or in",
        ),
        ({"plugins": "none"}, "no plugin library is named here"),
        ({"plugins": str(older)}, r"was compiled for TensorRT 10\.3 and [\d.]+ is installed: build"),
        ({"plugins": str(unloved)}, r"TensorRT cannot load the plugin library '.*unloved\.so'"),
    ]:
        with refused(PROVIDER_ERROR, sentence):
            opens(bundle, **options)
    ours = str(plugins)
    opens(bundle, "auto", plugins=ours)
    another, running = build.log
    assert "ours.so' is another build than the plans of bundle" in another
    assert running.endswith("with TensorRT")
    change(bundle, plugins=PluginsInfo("0.0.9", "0" * 64, ("segment_00",)))
    with refused(PROVIDER_ERROR, f"hold plugins of tide_export 0.0.9, but the library .* is of {__version__}"):
        opens(bundle, plugins=ours)


@pytest.mark.parametrize(("wrong", "copies"), [("copies", True), ("", False)])
def test_a_plugin_that_does_not_work_in_place_is_told_once(
    opens: Opens, build: Build, tiny_llama: TinyLlama, tmp_path: Path, plugins: Path, wrong: str, copies: bool
) -> None:
    bundle = with_engines(tiny_llama.exact, tmp_path / "bundle", FLAVOUR, build.version, wrong)
    change(bundle, plugins=PluginsInfo(__version__, "0" * 64, ("segment_01",)))
    engine = opens(bundle, plugins=str(plugins))
    build.log.clear()
    for _ in range(2):
        engine.generate(TEXT, mode="full", max_new_tokens=8, stop_token_ids=[])
    sentence = "TensorRT does not let the plugin in segment_01 update exit_states in place: a run over 1 sequences"
    assert build.log == ([f"{sentence} copies 1000 bytes"] if copies else [])


def test_copies_that_the_builder_reported_are_told_again(opens: Opens, bundle: Path, build: Build) -> None:
    change(bundle, copied={"segment_01": 8192})
    opens(bundle)
    sentence = "TensorRT copies buffers that segment_01 is to update in place: 8192 bytes in a run over one sequence"
    assert build.log == [sentence]


def test_a_machine_without_the_library_is_told_so(build: Build, bundle: Path) -> None:
    """In a process of its own, as this one has the stand-in."""
    child = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from c_interface import CEngine, Refused, open_library
library = open_library({str(build.binary)!r})
try:
    CEngine(library, {str(bundle)!r}, provider="tensorrt", threads=None, verify=False)
except Refused as error:
    print(error.status, error)
CEngine(library, {str(bundle)!r}, provider="auto", threads=None, verify=False)
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{PROVIDER_ERROR} TensorRT cannot be loaded (libnvinfer.so."), done.stderr
    assert "with ONNX Runtime on the CPU, not with tensorrt: TensorRT cannot be loaded" in done.stderr
