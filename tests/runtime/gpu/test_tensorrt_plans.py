"""`runtime.tensorrt.plans` and `plans.compare` on stand-ins for TensorRT's package (fake_tensorrt.py) and for CUDA."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import with_manifest
from caller_networks import CallersNetworks
from fake_cudart import FakeCudart
from fake_tensorrt import Bindings, Library
from generations import PROMPTS, alone, exits, facts, together, tokens_of
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.file_names import PLANS_FOLDER, plan_file
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import PlansInfo, PluginsInfo
from tide_export.bundle.profiles import profiles_for, run_sizes
from tide_export.bundle.store import write_manifest
from tide_export.common.version import __version__
from tide_export.errors import BuildError, GenerationError, ProviderError
from tide_export.plans import compare
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.tensorrt import cudart as calls
from tide_export.runtime.tensorrt import plans as opening


@pytest.fixture
def library(tiny_llama: TinyLlama, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> Library:
    bundle = open_bundle(tiny_llama.exact)
    library = Library(cudart, CallersNetworks(bundle), bundle.manifest.networks)
    monkeypatch.setattr(opening, "import_library", lambda flavour: library)
    monkeypatch.setattr(opening, "compute_capability", lambda gpu=0: (8, 9))
    monkeypatch.setattr(calls, "import_cudart", lambda: Bindings(cudart))
    return library


@pytest.fixture
def built(tiny_llama: TinyLlama, library: Library, tmp_path: Path) -> Path:
    """A tiny Llama's bundle with engines."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_llama.exact, folder)
    return with_plans(folder, library)


def with_plans(folder: Path, library: Library) -> Path:
    """Adds engines to a bundle."""
    (folder / PLANS_FOLDER).mkdir()
    for name in library.engines:
        (folder / plan_file(name)).write_bytes(name.encode())
    manifest = open_bundle(folder).manifest
    profiles = profiles_for(manifest.networks)
    engines = PlansInfo("tensorrt", library.__version__, ("8.9",), manifest.model.weights_sha256, profiles, 1.0)
    write_manifest(folder, replace(manifest, engines=engines))
    return folder


@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"mode": "exit"}, {"mode": "exit", "max_pending": 2}, {"mode": "lossless"}, {"logprobs": 1}],
    ids=str,
)
def test_engines_give_the_graph_s_tokens(
    graph: Engine, built: Path, cudart: FakeCudart, thresholds: list[float], options: dict[str, Any]
) -> None:
    options = options | ({"threshold": thresholds, "min_layers": 0} if options.get("mode") == "exit" else {})
    engine, before = load(built, provider="tensorrt", verify=False), cudart.calls("cudaGraphLaunch")
    assert engine.provider == "tensorrt"
    expected = alone(graph, **options)
    assert [facts(one) for one in alone(engine, **options)] == [facts(one) for one in expected]
    found = together(engine, **options)
    assert tokens_of(found) == tokens_of(expected)
    if options.get("mode") != "lossless":  # when drafts are verified depends on the others
        assert [exits(one) for one in found] == [exits(one) for one in expected]
    assert cudart.calls("cudaGraphLaunch") - before > 50, "runs are recorded and replayed"


def test_a_recorded_run_has_an_execution_context_of_its_own(
    built: Path, library: Library, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which lasts as long as the recording; with one for all runs of a profile, recordings are of changed contexts."""
    options = {"threshold": thresholds, "min_layers": 0}
    engine = load(built, provider="tensorrt", verify=False)
    alone(engine, **options)
    kept = sum(len(found.contexts) for found in library.engines.values())
    assert kept > len(library.engines) * 3
    del engine
    assert not any(found.contexts for found in library.engines.values())
    run = opening.TrtNetwork.run
    monkeypatch.setattr(
        opening.TrtNetwork,
        "run",
        lambda self, addresses, size, recording, captured: run(self, addresses, size, 0, captured),
    )
    engine = load(built, provider="tensorrt", verify=False)
    with pytest.raises(GenerationError, match="a recorded execution context was changed or destroyed"):
        alone(engine, **options)


def test_the_contexts_of_a_set_of_buffers_share_one_working_memory(
    built: Path, library: Library, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the size of the engine that needs most, whatever the number of networks, profiles and contexts; it is freed
    with the engine."""
    sizes: list[int] = []
    allocate = Bindings.cudaMalloc
    monkeypatch.setattr(Bindings, "cudaMalloc", lambda self, size: (sizes.append(size), allocate(self, size))[1])
    needs, before = {engine.device_memory_size_v2 for engine in library.engines.values()}, library.cudart.allocated
    engine = load(built, provider="tensorrt", verify=False)
    alone(engine, threshold=thresholds)
    together(engine, threshold=thresholds)
    assert len(needs) > 2
    assert sizes == [max(needs)] * 2, "one sequence alone and a batch run on streams of their own"
    contexts = [context for found in library.engines.values() for context in found.contexts]
    assert len(contexts) > 8
    assert len({context.memory for context in contexts}) == 2
    del engine, contexts
    assert library.cudart.allocated == before


def test_the_gpu_that_was_asked_for(graph: Engine, built: Path, cudart: FakeCudart) -> None:
    cudart.devices, cudart.only = 2, 1
    engine = load(built, provider="tensorrt", verify=False, device=1)
    assert tokens_of(alone(engine, PROMPTS[:2])) == tokens_of(alone(graph, PROMPTS[:2]))
    with pytest.raises(ProviderError, match="there is no GPU 2: CUDA finds 2, numbered from 0"):
        load(built, provider="tensorrt", verify=False, device=2)


@pytest.mark.parametrize("copying", ["segment_01", ""])
def test_a_plugin_that_does_not_work_in_place_is_told_once(
    built: Path, library: Library, compile_library: Callable[..., Path], caplog: pytest.LogCaptureFixture, copying: str
) -> None:
    manifest, library.copying = open_bundle(built).manifest, copying
    assert manifest.engines is not None
    engines = replace(manifest.engines, plugins=PluginsInfo(__version__, "0" * 64, ("segment_01",)))
    write_manifest(built, replace(manifest, engines=engines))
    engine = load(built, provider="tensorrt", verify=False, plugins=compile_library("ours"))
    caplog.clear()
    alone(engine, PROMPTS[:2])
    alone(engine, PROMPTS[:2])
    sentence = "TensorRT does not let the plugin in segment_01 update exit_states in place: a run over 1 sequences"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([f"{sentence} copies 1000 bytes"] if copying else [])


def test_copies_that_the_builder_reported_are_told_again(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = open_bundle(built).manifest
    assert manifest.engines is not None
    write_manifest(built, replace(manifest, engines=replace(manifest.engines, copied={"segment_01": 8192})))
    load(built, provider="tensorrt", verify=False)
    sentence = "TensorRT copies buffers that segment_01 is to update in place: 8192 bytes in a run over one sequence"
    assert sentence in caplog.messages


@pytest.mark.parametrize(
    ("wrongly", "says"),
    [
        (lambda logits: logits * 1.01, None),  # as much as FP8 changes
        (lambda logits: logits * 1.5, r"off by \d"),
        (lambda logits: logits * np.nan, "off by nan"),
    ],
    ids=["as FP8 is", "wrong", "not finite"],
)
def test_plans_in_fp8_are_compared_with_the_graph(
    built: Path, library: Library, monkeypatch: pytest.MonkeyPatch, wrongly: Callable[[Any], Any], says: str | None
) -> None:
    def spoil(run: Any, tensors: Any) -> None:
        if "logits" in tensors:
            logits = tensors["logits"]
            logits[...] = wrongly(logits)

    library.networks.after = spoil
    monkeypatch.setattr(compare, "compute_capability", lambda: (8, 9))
    compare.check_fp8_plans(built, None)  # not FP8
    assert not library.networks.runs
    manifest = open_bundle(built).manifest
    write_manifest(built, replace(manifest, networks=replace(manifest.networks, matrices="fp8")))
    with nullcontext() if says is None else pytest.raises(BuildError, match=f"TensorRT 11.1 computes wrongly.*{says}"):
        compare.check_fp8_plans(built, None)
    assert library.networks.runs


def test_plans_in_fp8_that_no_gpu_here_runs_are_not_compared(
    built: Path, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = open_bundle(built).manifest
    write_manifest(built, replace(manifest, networks=replace(manifest.networks, matrices="fp8")))
    for here in (None, (9, 0)):
        monkeypatch.setattr(compare, "compute_capability", lambda here=here: here)
        compare.check_fp8_plans(built, None)
        assert caplog.messages.pop() == (
            "the FP8 plans are not compared with the model, as no GPU here runs them; to do so: validate --provider "
            "tensorrt"
        )
    assert not library.networks.runs


def requests_of_a_trace(thresholds: list[float]) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 39 tokens, for 4 to 39 more, in all modes and with several ways to choose tokens."""
    random, exits = np.random.default_rng(60), {"threshold": thresholds, "min_layers": 0, "max_pending": 4}
    kinds: list[dict[str, Any]] = [exits, exits, exits | {"temperature": 0.8, "top_k": 20}, exits | {"logprobs": 2}]
    kinds += [{"mode": "full"}, {"mode": "lossless", "threshold": thresholds}]
    return [
        (
            random.integers(0, len(TEXT), random.integers(1, 40)).tolist(),
            kinds[random.integers(len(kinds))]
            | {"max_new_tokens": int(random.integers(4, 40)), "seed": number, "stop_token_ids": []},
        )
        for number in range(80)
    ]


@pytest.mark.parametrize("budget", [None, 10])
def test_a_serving_trace_keeps_few_contexts_and_recordings(
    graph: Engine,
    tiny_llama: TinyLlama,
    library: Library,
    cudart: FakeCudart,
    thresholds: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
) -> None:
    """Of requests that come and go in eight slots. Without blocks of slots and contexts that recordings share there are
    93 recordings and 612 contexts."""
    if budget is not None:
        monkeypatch.setenv("TIDE_CUDA_GRAPHS", str(budget))
    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    wide = replace(info, **run_sizes(info.capacity, 16, 8)._asdict())
    library.build(wide)
    folder = with_plans(with_manifest(tiny_llama.exact, tmp_path, networks=wide), library)
    engine, requests = load(folder, provider="tensorrt", verify=False), requests_of_a_trace(thresholds)
    scheduler, random = engine.scheduler(SchedulerLimits(slots=8, prompt_tokens=40)), np.random.default_rng(61)
    handles, most, before = list[Any](), Counter[str](), (cudart.objects, cudart.allocated)
    while len(handles) < len(requests) or scheduler.running or scheduler.waiting:
        arriving = int(random.integers(1, 4)) if random.random() < 0.25 else 0
        handles += [scheduler.submit(ids, **options) for ids, options in requests[len(handles) :][:arriving]]
        scheduler.step()
        contexts = sum(len(found.contexts) for found in library.engines.values())
        most |= Counter(contexts=contexts, recordings=cudart.objects - before[0], bytes=cudart.allocated - before[1])
    print(f"budget {budget} MiB: {dict(most)}, {cudart.calls('cudaGraphLaunch')} launches")
    for handle, (ids, options) in list(zip(handles, requests, strict=True))[::8]:
        assert handle.result().tokens == graph.generate(ids, **options).tokens
    assert most["recordings"] < (80 if budget is None else 40)
    assert most["contexts"] < (120 if budget is None else 60)
