"""Lists of prompts on segment networks in the C++ runtime, on the host and on the stand-in for the CUDA runtime: each
prompt gets the tokens and exits that it gets alone, with the counts of Python's batches on the same networks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_builds import cuda_headers
from cpp_engine import CppBatch, CppEngine, facts, prompts_of, words
from cpp_scheduler import CppScheduler
from test_cpp_segments import copy_with_nan, graphs

from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.errors import GenerationError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine
from tide_export.runtime.onnxruntime.segments import open_segments
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.thresholds.resolve import MAX_THRESHOLD, NEVER_EXIT

LENGTHS = (1, 37, 100, 2, 18, 130, 5, 64, 9, 3)  # more than the networks take at once, and some in parts
NEW_TOKENS = 16
FULL, EXITS, LOSSLESS = {"mode": "full"}, {"mode": "exit", "min_layers": 0}, {"mode": "lossless"}


@pytest.fixture(scope="module")
def python(demo_bundle: Path) -> Engine:
    bundle = open_bundle(demo_bundle, verify=False)
    return Engine(bundle, open_segments(bundle, threads=1))


@pytest.fixture(scope="module", params=["host", "gpu"])
def segmented(request: pytest.FixtureRequest, demo_bundle: Path, open_cpp: Callable[..., CppEngine]) -> CppEngine:
    need_cuda(request.param)
    return open_cpp(demo_bundle, verify=False, networks=request.param)


def need_cuda(networks: str) -> None:
    if networks == "gpu" and not cuda_headers():
        pytest.skip("there are no CUDA headers")


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[80 * number : 80 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def mixed(python: Engine, demo_text_ids: list[int]) -> list[float]:
    """Medians of the scores on the text, so that tokens exit at every checkpoint."""
    state = python.start([MAX_THRESHOLD] * 3)
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[:60]])
    return np.clip(np.quantile(scores, 0.5, axis=0), 0.0, 1.0).tolist()


def decisions(generation: Generation) -> tuple[list[int], str, list[int]]:
    """What does not depend on the other sequences of the batch."""
    return generation.tokens, generation.finish_reason, generation.stats.exit_layer


def together(engine: CppEngine, prompts: list[list[int]], **options: Any) -> list[Generation]:
    return engine.generate_batch(prompts, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **options)


def alone(engine: CppEngine, prompts: list[list[int]], **options: Any) -> list[Generation]:
    return [engine.generate(ids, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **options) for ids in prompts]


@pytest.mark.parametrize(("share", "max_pending"), [(1.0, 0), (0.0, 4), (0.5, 16)])
def test_every_prompt_exits_as_it_does_alone(segmented, prompts, mixed, share: float, max_pending: int) -> None:
    options = EXITS | {"threshold": mixed, "max_pending": max_pending}
    found = together(segmented, prompts, compaction_threshold=share, **options)
    assert len({layers for one in found for layers in one.stats.exit_layer}) > 1
    assert [decisions(one) for one in found] == [decisions(one) for one in alone(segmented, prompts, **options)]


@pytest.mark.parametrize("options", [FULL, LOSSLESS, LOSSLESS | {"prompt_lookup": 4, "max_pending": 3}])
def test_full_depth_and_lossless(segmented, prompts, mixed, options: dict[str, Any]) -> None:
    chosen = options if options == FULL else options | {"threshold": mixed}
    expected = [one.tokens for one in alone(segmented, prompts, **FULL)]
    assert [one.tokens for one in together(segmented, prompts, **chosen)] == expected


@pytest.mark.parametrize(
    "options", [FULL, EXITS, EXITS | {"max_pending": 2, "compaction_threshold": 0.0}, LOSSLESS], ids=str
)
@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}], ids=["candidates", "all logits"])
def test_everything_is_python_s(
    python, open_cpp: Callable[..., CppEngine], demo_bundle: Path, prompts, mixed, options, sampling
) -> None:
    """On the host, where both runtimes have the same sizes of runs."""
    chosen = options | sampling | ({} if options == FULL else {"threshold": mixed})
    found = together(open_cpp(demo_bundle, verify=False, networks="host"), prompts, **chosen)
    expected = python.generate(prompts, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **chosen)
    assert [facts(one) for one in found] == [facts(one) for one in expected]


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}])
def test_each_draws_its_own_random_numbers(segmented, prompts, mixed, sampling: dict[str, Any]) -> None:
    options = EXITS | {"threshold": mixed, "temperature": 1.1, **sampling}
    found = together(segmented, prompts[:3], seed=[5, 6, 7], **options)
    for one, ids, seed in zip(found, prompts, (5, 6, 7), strict=False):
        assert decisions(one) == decisions(alone(segmented, [ids], seed=seed, **options)[0])


def test_runs_are_recorded_and_replayed(segmented, prompts, mixed) -> None:
    before = graphs(segmented)
    together(segmented, prompts, threshold=mixed, **EXITS)
    recorded, launches = graphs(segmented) - before
    assert segmented.call("gpu_graphs") == [0, 0] or launches > recorded > 0


def test_requests_that_come_and_go(segmented, prompts, mixed) -> None:
    """On two slots; one is cancelled, and one does not fit the context any more."""
    options = EXITS | {"threshold": mixed, "stop_token_ids": []}
    expected = alone(segmented, prompts, **EXITS, threshold=mixed)
    long = [prompts[2][i % 100] for i in range(1021)]
    scheduler = CppScheduler(segmented, SchedulerLimits(slots=2, prompt_tokens=24))
    handles = [scheduler.submit(ids, max_new_tokens=NEW_TOKENS, **options) for ids in [*prompts[:4], long]]
    while len(handles[0].tokens) < 3:
        scheduler.step()
    handles[0].cancel()
    assert handles[0].result().finish_reason == "cancelled"
    for handle, other in zip(handles[1:4], expected[1:4], strict=True):
        assert decisions(handle.result()) == decisions(other)
    assert (len(handles[4].result().tokens), handles[4].result().finish_reason) == (4, "context")


def test_lists_in_threads_are_independent(segmented, prompts, mixed) -> None:
    """Lists of several lengths at once, each in buffers of its own."""
    options = EXITS | {"threshold": mixed, "stop_token_ids": []}
    expected = [decisions(one) for one in alone(segmented, prompts[:5], **EXITS, threshold=mixed)]
    arguments = [*prompts_of(prompts[:5]), *words(max_new_tokens=NEW_TOKENS, **options)]
    for omitted, answer in enumerate(segmented.call("batches_at_once", "3", *arguments)):
        found = [decisions(segmented.generation(one)) for one in answer]
        assert found == expected[: len(expected) - omitted]


def test_a_step_that_is_refused_changes_nothing(segmented, demo_bundle: Path, demo_text_ids) -> None:
    CppBatch.load(segmented, demo_bundle, "host")
    batch = CppBatch(segmented, 1.0, 2)
    first, second = (batch.join([NEVER_EXIT] * 3, 4) for _ in range(2))
    batch.step({first: [5], second: (demo_text_ids * 2)[:1021]}, {}, ())
    before = {slot: list(one.lengths) for slot, one in batch.sequences.items()}
    for bad, sentence in [
        ([1, 2, 3, 4], "the sequence would have 1025 tokens but the model's context holds 1024"),
        ([], "a step needs at least one token"),
    ]:
        with pytest.raises(GenerationError, match=sentence):
            batch.step({first: [6], second: bad}, {}, ())
    assert {slot: list(one.lengths) for slot, one in batch.sequences.items()} == before
    batch.step({first: [6], second: [1, 2, 3]}, {}, ())


@pytest.mark.parametrize("networks", ["host", "gpu"])
def test_nothing_of_a_sequence_reaches_the_next_not_even_nan(
    networks: str, demo_bundle: Path, open_cpp: Callable[..., CppEngine], prompts, mixed, tmp_path: Path
) -> None:
    """Of a prompt whose states overflow, to the others in the batch and to what has its slot afterwards."""
    need_cuda(networks)
    overflowing = 4095
    engine = open_cpp(copy_with_nan(demo_bundle, tmp_path / "bundle", overflowing), verify=False, networks=networks)
    options = EXITS | {"threshold": mixed, "max_pending": 3, "stop_token_ids": []}
    expected = [decisions(one) for one in alone(engine, prompts[:4], **EXITS, threshold=mixed, max_pending=3)]
    scheduler = CppScheduler(engine, SchedulerLimits(slots=3))
    for _ in range(2):
        submitted = [prompts[0], [overflowing, *prompts[1]], *prompts[1:4]]
        handles = [scheduler.submit(ids, max_new_tokens=NEW_TOKENS, **options) for ids in submitted]
        with pytest.raises(GenerationError, match="not finite"):
            handles.pop(1).result()
        assert [decisions(handle.result()) for handle in handles] == expected
    together(engine, prompts[:3], threshold=mixed, **EXITS)  # in the same buffers, once the scheduler has left them


def test_what_is_refused_is_one_sentence(
    demo_bundle: Path, open_cpp: Callable[..., CppEngine], tmp_path: Path, segmented
) -> None:
    with pytest.raises(GenerationError, match="prefix_cache_bytes is for provider 'cpu': the K/V of other providers"):
        CppScheduler(segmented, SchedulerLimits(prefix_cache_bytes=1 << 24))
    one = shutil.copytree(demo_bundle, tmp_path / "one")
    manifest = open_bundle(one, verify=False).manifest
    assert manifest.networks is not None
    write_manifest(one, replace(manifest, networks=replace(manifest.networks, max_batch_size=1)))
    lone = open_cpp(one, verify=False, networks="host")
    assert lone.max_batch_size == 1
    sentence = r"take one sequence at a time .*: give one prompt at a time, or use provider 'cpu'"
    with pytest.raises(GenerationError, match=sentence):
        lone.generate_batch([[1, 2], [3]], max_new_tokens=4)
    with pytest.raises(GenerationError, match=sentence):
        CppScheduler(lone, SchedulerLimits())
    assert len(lone.generate([1, 2], max_new_tokens=2).tokens) == 2


def test_too_little_memory_is_one_sentence(demo_bundle: Path, open_cpp: Callable[..., CppEngine], prompts) -> None:
    need_cuda("gpu")
    engine = open_cpp(demo_bundle, verify=False, networks="gpu")
    engine.call("gpu_memory", str(1 << 20))
    for _ in range(2):
        with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
            together(engine, prompts[:2], **FULL)
    engine.call("gpu_memory", str(1 << 30))
    assert len(together(engine, prompts[:2], **FULL)) == 2


def test_larger_buffers_replace_smaller_ones(demo_bundle: Path, open_cpp: Callable[..., CppEngine], prompts) -> None:
    """And serve smaller batches from then on, so that two sizes are never held."""
    need_cuda("gpu")
    engine = open_cpp(demo_bundle, verify=False, networks="gpu")
    together(engine, prompts[:2], **FULL)
    together(engine, prompts[:4], **FULL)
    engine.call("gpu_memory", "0")  # nothing more can be had
    assert len(together(engine, prompts[:2], **FULL)) == 2
