"""The C++ runtime on segment networks: steps and buffers against the branched graph and Python, on the host and on a
stand-in for the CUDA runtime that executes late, replays recordings and fills memory with NaN."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpp_builds import cuda_headers
from cpp_engine import CppEngine, facts

from tide_export import names
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.errors import GenerationError, ProviderError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD


@pytest.fixture(scope="module")
def python(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


@pytest.fixture(scope="module", params=["host", "gpu"])
def segmented(request: pytest.FixtureRequest, demo_bundle: Path, open_cpp: Callable[..., CppEngine]) -> CppEngine:
    if request.param == "gpu" and not cuda_headers():
        pytest.skip("there are no CUDA headers")
    return open_cpp(demo_bundle, verify=False, networks=request.param)


@pytest.fixture(scope="module")
def mixed(python: Engine, demo_text_ids: list[int]) -> list[float]:
    """Medians of the scores on the text, so that tokens exit at every checkpoint."""
    state = python.start([MAX_THRESHOLD] * 3)
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[:100]])
    return np.clip(np.quantile(scores, 0.5, axis=0), 0.0, 1.0).tolist()


def graphs(engine: CppEngine) -> np.ndarray:
    """CUDA graphs recorded, and launches of them."""
    return np.array(engine.call("gpu_graphs") or [0, 0])


def assert_same(python: Engine, cpp: CppEngine, ids: list[int], count: int, **options: Any) -> Generation:
    generation = cpp.generate(ids, max_new_tokens=count, stop_token_ids=[], **options)
    assert facts(generation) == facts(python.generate(ids, max_new_tokens=count, stop_token_ids=[], **options))
    return generation


@pytest.mark.parametrize("length", [1, 2, 17, 200])
def test_full_depth(python, segmented, demo_text_ids, length: int) -> None:
    assert set(assert_same(python, segmented, demo_text_ids[-length:], 12, mode="full").stats.exit_layer) == {12}


@pytest.mark.parametrize(("length", "max_pending"), [(1, 16), (5, 0), (33, 1), (64, 4), (200, 16), (150, 20)])
def test_exits(python, segmented, demo_text_ids, mixed, length: int, max_pending: int) -> None:
    ids, options = demo_text_ids[500 : 500 + length], {"threshold": mixed, "min_layers": 0, "max_pending": max_pending}
    assert len(set(assert_same(python, segmented, ids, 32, **options).stats.exit_layer)) > 1


@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 0, "max_pending": 2}, {"max_pending": 0}])
def test_lossless(python, segmented, demo_text_ids, mixed, options: dict[str, int]) -> None:
    ids = demo_text_ids[100:140] * 2  # repeats itself, so that lookups come to something
    generation = assert_same(python, segmented, ids, 32, mode="lossless", threshold=mixed, **options)
    assert generation.tokens == segmented.generate(ids, max_new_tokens=32, mode="full", stop_token_ids=[]).tokens
    assert generation.stats.drafted > generation.stats.accepted > 0


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
@pytest.mark.parametrize(
    "sampling", [{"top_k": 1}, {"top_k": 40}, {"top_k": 100, "top_p": 0.9}, {"top_k": 127, "min_p": 0.05}]
)
def test_tokens_drawn_from_candidates_are_those_drawn_from_all_logits(
    segmented, demo_text_ids, mixed, mode: str, sampling: dict[str, float]
) -> None:
    """With log-probabilities all logits cross to the host, without them the candidates alone."""
    ids, options = demo_text_ids[40:70], {"mode": mode, "temperature": 1.2, "seed": 5, "stop_token_ids": [], **sampling}
    if mode == "exit":
        options |= {"threshold": mixed, "min_layers": 0}
    few = segmented.generate(ids, max_new_tokens=40, **options)
    every = segmented.generate(ids, max_new_tokens=40, logprobs=0, **options)
    assert few.logprobs is None
    assert every.logprobs is not None
    assert facts(few) == facts(replace(every, logprobs=None))


def test_runs_are_recorded_and_replayed(python, segmented, demo_text_ids, mixed) -> None:
    """One recording per network, number of tokens and place of the result, not one per step."""
    before = graphs(segmented)
    assert_same(python, segmented, demo_text_ids[:20], 60, threshold=mixed, min_layers=0)
    recorded, launches = graphs(segmented) - before
    if segmented.call("gpu_graphs") != [0, 0]:
        assert launches > 120
        assert recorded < 80


def test_the_whole_context_and_no_token_more(python, segmented, demo_text_ids, mixed) -> None:
    """Longer than what may wait, and so near the end of the buffers that nothing may be padded."""
    ids = [*demo_text_ids, *demo_text_ids[:22]]
    assert_same(python, segmented, ids, 9, threshold=mixed, min_layers=0)
    state = segmented.start(mixed, 4)
    state.step(demo_text_ids[:7])
    before = (state.lengths, state.pending)
    for bad, sentence in [
        ([1] * 1018, "the sequence would have 1025 tokens but the model's context holds 1024"),
        ([], "a step needs at least one token"),
        ([4096], "token id 4096, outside the vocabulary"),
    ]:
        with pytest.raises(GenerationError, match=sentence):
            state.step(bad)
    for length in (-1, 8):
        with pytest.raises(GenerationError, match=f"a sequence of 7 tokens cannot be rewound to {length}"):
            state.rewind(length)
    assert (state.lengths, state.pending, state.capacity) == (*before, 1024)


def test_buffers_are_used_again_and_by_one_sequence_at_a_time(python, segmented, demo_text_ids, mixed) -> None:
    ids, options = demo_text_ids[300:330], {"threshold": mixed, "min_layers": 0, "stop_token_ids": []}
    segmented.start([0.0] * 3, 1000).step(demo_text_ids[100:160])  # leaves its K/V, and its pending states, in buffers
    expected = [facts(python.generate(ids[: len(ids) - omitted], max_new_tokens=16, **options)) for omitted in range(4)]
    for _ in range(2):
        answers = segmented.call("at_once", "4", *segmented.request(ids, 16, **options))
        assert [facts(segmented.generation(answer)) for answer in answers] == expected


@pytest.mark.parametrize("networks", ["host", "gpu"])
def test_nothing_of_a_sequence_reaches_the_next_not_even_nan(
    networks: str, demo_bundle: Path, open_cpp: Callable[..., CppEngine], demo_text_ids, mixed, tmp_path: Path
) -> None:
    """A model in which one token overflows, as one does in half precision."""
    if networks == "gpu" and not cuda_headers():
        pytest.skip("there are no CUDA headers")
    overflowing = 4095
    bundle = copy_with_nan(demo_bundle, tmp_path / "bundle", overflowing)
    engine = open_cpp(bundle, verify=False, networks=networks)
    options = {"threshold": mixed, "min_layers": 0, "max_pending": 3, "stop_token_ids": []}
    before = facts(engine.generate(demo_text_ids[:10], max_new_tokens=16, **options))
    for _ in range(2):
        with pytest.raises(GenerationError, match="not finite"):
            engine.generate([overflowing, *demo_text_ids[:60]], max_new_tokens=16, **options)
        assert facts(engine.generate(demo_text_ids[:10], max_new_tokens=16, **options)) == before
    with pytest.raises(GenerationError, match="not finite"):  # and all of it waits
        engine.generate(
            [overflowing, *demo_text_ids[:8]], max_new_tokens=1, threshold=0.0, min_layers=0, max_pending=1000
        )
    state = engine.start([0.0] * 3, 1000)
    for token in demo_text_ids[:2]:
        state.step([token])
    assert np.isfinite(state.step([7], full=True).logits).all()  # over three tokens, padded to four


def copy_with_nan(bundle: Path, folder: Path, token: int) -> Path:
    """A bundle whose first network embeds one token as NaN."""
    shutil.copytree(bundle, folder)
    manifest, file = open_bundle(folder, verify=False).manifest, folder / names.network_file(names.segment(0))
    model = onnx.load(file, load_external_data=False)
    (embedding,) = (entry for entry in model.graph.initializer if list(entry.dims) == [4096, 128])
    weights = onnx.numpy_helper.to_array(embedding, str(file.parent)).copy()
    weights[token] = np.nan
    embedding.CopyFrom(onnx.numpy_helper.from_array(weights, embedding.name))
    onnx.save(model, file)
    info = replace(manifest.files[names.network_file(names.segment(0))], size=file.stat().st_size)
    write_manifest(folder, replace(manifest, files={**manifest.files, names.network_file(names.segment(0)): info}))
    return folder


def test_sampling_draws_what_the_graph_draws(segmented, demo_bundle: Path, open_cpp, demo_text_ids) -> None:
    graph, options = open_cpp(demo_bundle, verify=False), {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    for mode in ("exit", "lossless"):
        one, other = (
            engine.generate(demo_text_ids[:20], max_new_tokens=16, mode=mode, **options)
            for engine in (graph, segmented)
        )
        assert facts(one) == facts(other)


def test_too_little_memory_is_one_sentence(demo_bundle: Path, open_cpp: Callable[..., CppEngine]) -> None:
    if not cuda_headers():
        pytest.skip("there are no CUDA headers")
    engine = open_cpp(demo_bundle, verify=False, networks="gpu")
    engine.call("gpu_memory", str(1 << 20))
    for _ in range(2):
        with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
            engine.start([0.5] * 3)
    engine.call("gpu_memory", str(1 << 30))
    engine.start([0.5] * 3).step([1, 2, 3])


def test_work_goes_to_the_gpu_that_was_asked_for(cpp, demo_bundle: Path, demo_text_ids) -> None:
    """In threads too; the stand-in refuses what comes before a GPU is set, and the other GPU."""
    if not cuda_headers():
        pytest.skip("there are no CUDA headers")
    ids, options = demo_text_ids[300:320], {"threshold": 0.5, "max_new_tokens": 8}
    environment = {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_GPU": "1"}
    how = {"verify": False, "networks": "gpu", "environment": environment}
    engine = CppEngine(cpp.driver, demo_bundle, device=1, **how)
    tokens = engine.generate(ids, **options).tokens
    assert tokens == load(demo_bundle, provider="cpu", threads=1, verify=False).generate(ids, **options).tokens
    answers = engine.call("at_once", "2", *engine.request(ids, **options))
    assert answers[0]["tokens"] == tokens
    engine.close()
    absent = CppEngine(cpp.driver, demo_bundle, device=2, **how)
    with pytest.raises(ProviderError, match="there is no GPU 2: CUDA finds 2, numbered from 0"):
        absent.start([0.5] * 3)
    absent.close()


@pytest.mark.parametrize("call", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_what_cannot_be_recorded_is_queued_with_one_warning(cpp, demo_bundle: Path, demo_text_ids, capfd, call) -> None:
    if not cuda_headers():
        pytest.skip("there are no CUDA headers")
    ids, options = demo_text_ids[300:320], {"threshold": 0.5, "max_new_tokens": 8}
    expected = load(demo_bundle, provider="cpu", threads=1, verify=False).generate(ids, **options).tokens
    engine = CppEngine(cpp.driver, demo_bundle, verify=False, networks="gpu", environment={"FAKE_CUDA_FAILS": call})
    for _ in range(2):
        assert engine.generate(ids, **options).tokens == expected
    assert engine.call("gpu_graphs") == [0, 0]
    engine.close()
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "CUDA" in line]
    assert f"runs are not recorded as CUDA graphs, which makes decoding slower: CUDA failed ({call})" in warning
