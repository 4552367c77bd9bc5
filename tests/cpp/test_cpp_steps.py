"""Both runtimes step by step against the hand-made model in plain NumPy, and `stream`."""

from typing import Any

import numpy as np
import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine, CppState
from tiny_model import TinyModel

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.errors import GenerationError
from tide_export.runtime.engine import load
from tide_export.thresholds.resolve import NEVER_EXIT


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 48, count).tolist()


@pytest.mark.parametrize(
    ("thresholds", "max_pending"),
    [
        ([NEVER_EXIT, NEVER_EXIT], 4),
        ([0.0, 0.0], 0),
        ([0.5, 0.5], 3),
        ([0.8, 0.7], 1000),
        ([NEVER_EXIT, 0.65], 4),
        ([0.6, NEVER_EXIT], 4),
    ],
)
def test_every_step_equals_the_plain_model(
    tiny: TinyModel, tiny_engine: Any, thresholds: list[float], max_pending: int
) -> None:
    ids = random_ids(60, seed=3)
    logits, exit_layers, scores = tiny.reference(ids, thresholds)
    state = tiny_engine.start(thresholds, max_pending, room=0)
    stop = 0
    for count in [3, 1, 1, 5, 1, 9, *[1] * 24, 2, *[1] * 14]:
        stop += count
        result = state.step(ids[stop - count : stop])
        np.testing.assert_allclose(result.logits, logits[stop - 1], atol=2e-5)
        assert result.exit_layer == exit_layers[stop - 1]
        reached = result.segments_run if result.segments_run < 3 else 2
        np.testing.assert_allclose(result.scores[:reached], scores[stop - 1, :reached], atol=1e-5)
        assert np.isnan(result.scores[reached:]).all()
        assert state.lengths[: result.segments_run] == [stop] * result.segments_run
        assert max(state.pending) <= max_pending


@pytest.mark.parametrize("broken", ["none", "outside", "too many"])
def test_a_failed_step_leaves_the_sequence_unchanged(tiny: TinyModel, tiny_engines: Any, broken: str) -> None:
    state, ids = tiny_engines["cpp"].start([0.5, 0.5], 4), random_ids(20, seed=2)
    state.step(ids[:9])
    before = (state.lengths, state.pending, state.capacity)
    bad, sentence = {
        "none": ([], "a step needs at least one token"),
        "outside": ([1, 48], "token id 48, outside the vocabulary 0..47"),
        "too many": ([1] * 248, "would have 257 tokens but the model's context holds 256"),
    }[broken]
    with pytest.raises(GenerationError, match=sentence):
        state.step(bad)
    assert (state.lengths, state.pending, state.capacity) == before
    logits, exit_layers, _ = tiny.reference(ids, [0.5, 0.5])
    result = state.step(ids[9:])
    assert result.exit_layer == exit_layers[-1]
    np.testing.assert_allclose(result.logits, logits[-1], atol=2e-5)


def test_not_enough_memory(tiny: TinyModel, open_cpp: Any, tmp_path: Any) -> None:
    engine = open_cpp(TinyModel(context=None).write(tmp_path / "endless"))
    state = engine.start([0.5, 0.5], 4, room=2**58)
    for _ in range(2):
        with pytest.raises(GenerationError, match="not enough memory for the K/V cache of"):
            state.step([1, 2])
        assert state.lengths == [0, 0, 0]
    assert engine.start([0.5, 0.5], 4).step([1, 2]).exit_layer == tiny.reference([1, 2], [0.5, 0.5])[1][-1]


def test_a_sequence_outlives_its_engine_and_is_replaced_by_another_s(cpp: CppBuild, tiny: TinyModel, tmp_path) -> None:
    engine = CppEngine(cpp.driver, tiny.write(tmp_path / "one"))
    state = engine.start([0.5, 0.5], 4)
    for number in range(2):  # the second replaces the first's, whose engine no longer exists
        state.step([1, 2, 3])
        engine.call("load", str(tiny.write(tmp_path / f"other{number}", max_pending=2)))
        logits, exit_layers, _ = tiny.reference([1, 2, 3, 4], [0.5, 0.5])
        result = state.step([4])
        assert result.exit_layer == exit_layers[-1]
        np.testing.assert_allclose(result.logits, logits[-1], atol=2e-5)
        state = CppState(engine, 1, [0.5, 0.5], 4, 8)
        assert state.length == 0
    engine.close()


def test_a_callback_ends_the_stream(tiny_engines: Any) -> None:
    cpp, ids = tiny_engines["cpp"], random_ids(5, seed=1)
    for mode in ("exit", "lossless"):
        request = cpp.request(ids, 30, mode=mode, stop_token_ids=[])
        whole = cpp.generation(cpp.call("generate", *request))
        answer = cpp.call("stream", "7", *request)
        generation = cpp.generation(answer["generation"])
        assert answer["taken"] == generation.tokens == whole.tokens[:7]
        assert generation.finish_reason == "cancelled"
        assert generation.stats.exit_layer == whole.stats.exit_layer[:7]


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_finish_reasons(tiny_engines: Any, mode: str) -> None:
    prompt = random_ids(20, seed=4)
    options: dict[str, Any] = {"mode": mode} if mode == "full" else {"mode": mode, "threshold": 0.5}
    python, cpp = (tiny_engines[name].generate(prompt, max_new_tokens=400, **options) for name in ("python", "cpp"))
    assert (cpp.tokens, cpp.finish_reason) == (python.tokens, "context")
    assert len(prompt) + len(cpp.tokens) == 257  # the last token is not run
    stop = cpp.tokens[30]
    stopped = [
        tiny_engines[name].generate(prompt, max_new_tokens=400, stop_token_ids=[stop, 47], **options)
        for name in ("python", "cpp")
    ]
    assert stopped[0].tokens == stopped[1].tokens == cpp.tokens[: cpp.tokens.index(stop) + 1]
    assert stopped[1].finish_reason == "stop"


def test_defaults_of_the_bundle(open_cpp: Any, tiny: TinyModel, tmp_path: Any) -> None:
    tuned = Drafting((0.125, 0.25), 3, 0, (0.4, 0.8), DEFAULT_VERIFY_COSTS, {})
    for drafting, drafts in [(None, [0.5, NEVER_EXIT]), (tuned, [0.125, 0.25])]:
        bundle = tiny.write(tmp_path / f"{drafts[0]}", min_layers=4, drafting=drafting)
        engine = open_cpp(bundle)
        assert engine.call("thresholds") == [NEVER_EXIT, 0.5]
        assert engine.call("thresholds", "--mode", "lossless") == drafts  # min_layers does not apply to drafts
        both = load(bundle, threads=1), engine
        python, cpp = (one.generate([1, 2, 3], max_new_tokens=40, mode="lossless") for one in both)
        assert (cpp.tokens, cpp.stats.exit_layer, cpp.stats.drafted) == (
            python.tokens,
            python.stats.exit_layer,
            python.stats.drafted,
        )


def test_a_graph_without_checkpoints(open_cpp: Any, tmp_path: Any) -> None:
    tiny = TinyModel(checkpoints=())
    engine = open_cpp(tiny.write(tmp_path / "plain"))
    generation = engine.generate([1, 2, 3], max_new_tokens=20)
    assert generation.tokens == tiny.reference_greedy([1, 2, 3], [], 20)[0]
    assert engine.start([], 0).step([1, 2, 3]).segments_run == 1
    with pytest.raises(GenerationError, match=r"min_layers is for checkpoints, and bundle .* has none"):
        engine.generate([1], min_layers=2)
