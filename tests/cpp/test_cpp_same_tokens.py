"""The C++ runtime on real exported models: tokens, exit layers and statistics equal the Python runtime's."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine, facts

from tide_export.errors import GenerationError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD, NEVER_EXIT

Both = tuple[Engine, CppEngine]


@pytest.fixture(scope="module")
def both(demo_bundle: Path, open_cpp: Callable[..., CppEngine]) -> Both:
    return load(demo_bundle, threads=1), open_cpp(demo_bundle)


@pytest.fixture(scope="module")
def mixed(both: Both, demo_text_ids: list[int]) -> list[float]:
    """Thresholds that about half of the scores at each checkpoint exceed."""
    state = both[0].start([MAX_THRESHOLD] * 3)
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[:100]])
    return np.clip(np.quantile(scores, 0.5, axis=0), 0.0, 1.0).tolist()


def assert_same(both: Both, ids: list[int], count: int, **options: Any) -> Generation:
    python, cpp = (engine.generate(ids, max_new_tokens=count, **options) for engine in both)
    assert facts(cpp) == facts(python)
    assert cpp.stats.prefill_seconds > 0
    return cpp


@pytest.mark.parametrize("length", [1, 2, 40, 600])
def test_full_depth(both: Both, demo_text_ids: list[int], length: int) -> None:
    generation = assert_same(both, demo_text_ids[-length:], 24, mode="full", stop_token_ids=[])
    assert set(generation.stats.exit_layer) == {12}


@pytest.mark.parametrize("max_pending", [0, 1, 4, 16])
@pytest.mark.parametrize("length", [1, 30, 150])
def test_exits(both: Both, demo_text_ids: list[int], mixed: list[float], length: int, max_pending: int) -> None:
    options = {"threshold": mixed, "min_layers": 0, "max_pending": max_pending, "stop_token_ids": []}
    generation = assert_same(both, demo_text_ids[500 : 500 + length], 60, **options)
    assert len(set(generation.stats.exit_layer)) > 1 + (length > 1)  # or the case proves little
    if max_pending == 16:
        assert generation.stats.layers_skipped_per_token > 0


def test_the_bundles_own_defaults_are_used(both: Both, demo_text_ids: list[int]) -> None:
    manifest = both[0].manifest
    defaults = both[1].call("thresholds")
    np.testing.assert_allclose(defaults, manifest.thresholds, rtol=1e-6)
    assert both[1].call("thresholds", "--min-layers", "4", "--threshold", "0.25") == [NEVER_EXIT, 0.25, 0.25]
    assert both[1].call("thresholds", "--mode", "full") == [NEVER_EXIT] * 3
    assert_same(both, demo_text_ids[200:230], 40)  # with the model's stop tokens


@pytest.mark.parametrize("min_layers", [4, 7, 99])
def test_min_layers(both: Both, demo_text_ids: list[int], min_layers: int) -> None:
    generation = assert_same(both, demo_text_ids[:20], 20, threshold=0.05, min_layers=min_layers, stop_token_ids=[])
    assert min(generation.stats.exit_layer) >= min(min_layers, 12)


def test_buffers_grow_again_and_again(both: Both, demo_text_ids: list[int], mixed: list[float]) -> None:
    """Three sizes, with pending tokens and segments of different lengths while K/V move."""
    python, cpp = both[0].start(mixed, 5, room=2), both[1].start(mixed, 5, room=2)
    sizes = set()
    for start, stop in [(0, 3), *((t, t + 1) for t in range(3, 20)), (20, 33), *((t, t + 1) for t in range(33, 45))]:
        ours, theirs = cpp.step(demo_text_ids[start:stop]), python.step(demo_text_ids[start:stop])
        np.testing.assert_array_equal(ours.logits, theirs.logits)
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        assert (ours.exit_layer, ours.segments_run) == (theirs.exit_layer, theirs.segments_run)
        assert (cpp.lengths, cpp.pending, cpp.capacity) == (python.lengths, python.pending, python.capacity)
        sizes.add(cpp.capacity)
    assert len(sizes) >= 4


def test_sequences_in_threads_are_independent(both: Both, demo_text_ids: list[int], mixed: list[float]) -> None:
    ids, options = demo_text_ids[300:340], {"threshold": mixed, "min_layers": 0, "stop_token_ids": []}
    answers = both[1].call("at_once", "4", *both[1].request(ids, 30, **options))
    for omitted, answer in enumerate(answers):
        alone = both[0].generate(ids[: len(ids) - omitted], max_new_tokens=30, **options)
        assert facts(both[1].generation(answer)) == facts(alone)


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt_lookup": 0, "max_pending": 2}, {"prompt_lookup": 16}, {"max_pending": 0}],
    ids=["default", "exits", "lookup", "lookup alone"],
)
def test_lossless(both: Both, demo_text_ids: list[int], mixed: list[float], options: dict[str, int]) -> None:
    ids = demo_text_ids[100:140] * 2  # repeats itself, so that prompt lookup drafts
    generation = assert_same(both, ids, 40, mode="lossless", threshold=mixed, stop_token_ids=[], **options)
    assert generation.tokens == both[1].generate(ids, max_new_tokens=40, mode="full", stop_token_ids=[]).tokens
    assert generation.stats.drafted > generation.stats.accepted > 0


def test_a_cache_that_propagates(
    propagating_bundle: Path, open_cpp: Callable[..., CppEngine], demo_text_ids: list[int], mixed: list[float]
) -> None:
    both = load(propagating_bundle, threads=1), open_cpp(propagating_bundle)
    for length in (1, 30):
        generation = assert_same(both, demo_text_ids[:length], 30, threshold=mixed, min_layers=0, stop_token_ids=[])
        assert len(set(generation.stats.exit_layer)) > 2
    with pytest.raises(Exception, match="propagates: export it with kv_cache_strategy exact"):
        both[1].generate([1], mode="lossless")
    for engine in both:
        with pytest.raises(GenerationError, match=r"max_pending is for an exact K/V cache: bundle .* propagates"):
            engine.generate([1], max_pending=2)


def test_the_example_program(
    cpp: CppBuild, demo_bundle: Path, both: Both, demo_text_ids: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("\n".join(map(str, demo_text_ids[:30])))
    options = ["--max-new-tokens", "8", "--threshold", "0.6,0.7,0.8", "--min-layers", "0", "--threads", "1"]
    done = subprocess.run(
        [cpp.program, demo_bundle, "--ids-file", file, *options], capture_output=True, text=True, check=True
    )
    expected = both[0].generate(demo_text_ids[:30], max_new_tokens=8, threshold=[0.6, 0.7, 0.8], min_layers=0)
    assert facts(CppEngine.generation(json.loads(done.stdout))) == facts(expected)
