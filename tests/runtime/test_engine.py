"""Generation from end to end on the hand-made model: tokens, stops, limits, statistics, threads and bad requests."""

import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_model import TinyModel

from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.thresholds.resolve import NEVER_EXIT

PROMPT = [5, 17, 3]


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.7, [0.6, 0.7], 1.0])
@pytest.mark.parametrize("max_pending", [0, 1, 4, 16, 2**63 - 1])
def test_tokens_and_exits_are_the_plain_model_s(
    tiny: TinyModel, tiny_engine: Engine, threshold: float | list[float], max_pending: int
) -> None:
    done = tiny_engine.generate(PROMPT, max_new_tokens=40, threshold=threshold, max_pending=max_pending)
    values = threshold if isinstance(threshold, list) else [threshold] * 2
    tokens, exits = tiny.reference_greedy(PROMPT, values, 40)
    assert done.tokens == tokens
    assert done.stats.exit_layer == exits
    assert done.finish_reason == "length"


@pytest.mark.parametrize("length", [1, 2, 33, 200])
def test_prompts_of_any_length(tiny: TinyModel, tiny_engine: Engine, length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, 48, length)
    done = tiny_engine.generate(prompt, max_new_tokens=12, threshold=0.6)
    assert done.tokens == tiny.reference_greedy(prompt.tolist(), [0.6, 0.6], 12)[0]
    assert done.stats.prompt_tokens == length


def test_full_mode_never_exits(tiny: TinyModel, tiny_engine: Engine) -> None:
    done = tiny_engine.generate(PROMPT, max_new_tokens=40, mode="full")
    assert done.tokens == tiny.reference_greedy(PROMPT, [NEVER_EXIT, NEVER_EXIT], 40)[0]
    assert done.stats.exit_rate == 0.0
    assert done.stats.layers_run == [6] * 40
    assert done.stats.layer_tokens_run == done.stats.layer_tokens_total == 6 * (3 + 39)


def test_min_layers_keeps_the_shallow_checkpoint_off(tiny: TinyModel, tiny_engine: Engine) -> None:
    done = tiny_engine.generate(PROMPT, max_new_tokens=40, threshold=0.3, min_layers=3)
    assert done.tokens == tiny.reference_greedy(PROMPT, [NEVER_EXIT, 0.3], 40)[0]
    assert done.stats.exits_per_layer[2] == 0
    assert done.stats.exits_per_layer[4] > 0


def test_what_is_not_said_is_the_bundle_s(tmp_path: Path, tiny: TinyModel) -> None:
    engine = load(tiny.write(tmp_path / "b", thresholds=(0.9, 0.6), min_layers=3, max_pending=2))
    exits = GenerationConfig(mode="exit", max_new_tokens=30)
    done = engine.generate(PROMPT, exits)
    assert done.tokens == tiny.reference_greedy(PROMPT, [NEVER_EXIT, 0.6], 30)[0]
    assert done.stats.layers_run == engine.generate(PROMPT, exits, max_pending=2).stats.layers_run
    assert done.stats.layers_run != engine.generate(PROMPT, exits, max_pending=9).stats.layers_run
    assert (
        engine.generate(PROMPT, max_new_tokens=30, min_layers=0).tokens
        == tiny.reference_greedy(PROMPT, [0.9, 0.6], 30)[0]
    )


def test_numpy_values_are_as_good_as_python_s(tiny_engine: Engine) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=20, threshold=[0.5, 0.75], min_layers=2, max_pending=3)
    done = tiny_engine.generate(
        np.array(PROMPT, np.uint16),
        max_new_tokens=np.int64(20),
        threshold=[np.float32(0.5), np.float64(0.75)],
        min_layers=np.int32(2),  # type: ignore[arg-type]
        max_pending=np.int8(3),  # type: ignore[arg-type]
    )
    assert done.tokens == expected.tokens
    assert all(type(token) is int for token in done.tokens)


def test_sampling_is_seeded(tiny_engine: Engine) -> None:
    def draw(seed: int, **options: object) -> list[int]:
        return tiny_engine.generate(PROMPT, max_new_tokens=30, temperature=1.5, seed=seed, **options).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1, top_k=1) == tiny_engine.generate(PROMPT, max_new_tokens=30).tokens
    assert draw(1, max_pending=0) == draw(1, max_pending=16)


def test_a_model_without_checkpoints_generates(tmp_path: Path) -> None:
    full = TinyModel(checkpoints=())
    done = load(full.write(tmp_path / "full")).generate(PROMPT, max_new_tokens=20)
    assert done.tokens == full.reference_greedy(PROMPT, [], 20)[0]
    assert (done.stats.exits_per_layer, done.stats.layers_run_per_token) == ({}, 6.0)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_models_own_stop_tokens_end_it_and_are_included(tmp_path: Path, tiny: TinyModel) -> None:
    free = tiny.reference_greedy(PROMPT, [NEVER_EXIT] * 2, 30)[0]
    stop = free[7]
    engine = load(TinyModel(eos=(0, stop)).write(tmp_path / "b"))
    done = engine.generate(PROMPT, max_new_tokens=30)
    assert done.tokens == free[: free.index(stop) + 1]
    assert done.finish_reason == "stop"
    assert engine.generate(PROMPT, max_new_tokens=30, stop_token_ids=[]).tokens == free
    other = free[3]
    assert engine.generate(PROMPT, max_new_tokens=30, stop_token_ids=[other]).tokens == free[: free.index(other) + 1]


def test_the_end_of_the_context_ends_it(tmp_path: Path) -> None:
    short = TinyModel(context=10)
    engine = load(short.write(tmp_path / "b"))
    done = engine.generate(PROMPT, max_new_tokens=30)
    # Positions 3..9 are fed back, the token that would be at position 10 is still known.
    assert done.tokens == short.reference_greedy(PROMPT, [NEVER_EXIT] * 2, 8)[0]
    assert done.finish_reason == "context"
    assert engine.generate(PROMPT, max_new_tokens=8).finish_reason == "length"
    assert len(engine.generate([1] * 10, max_new_tokens=5).tokens) == 1
    with pytest.raises(GenerationError, match="has 11 tokens but the model's context holds 10"):
        engine.generate([1] * 11, max_new_tokens=5)


def test_a_stream_yields_what_generate_returns(tiny_engine: Engine) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=20)
    stream = tiny_engine.stream(PROMPT, max_new_tokens=20)
    assert stream.stats.total_tokens == 0
    assert stream.finish_reason is None
    first = next(stream)
    assert stream.stats.total_tokens == 1
    assert stream.finish_reason is None
    assert [first, *stream] == expected.tokens
    assert stream.finish_reason == "length"
    assert list(stream) == []
    assert stream.stats.exit_layer == expected.stats.exit_layer


def test_a_stream_is_lazy(tiny_engine: Engine) -> None:
    stream = tiny_engine.stream(PROMPT, max_new_tokens=100)
    for _ in range(3):
        next(stream)
    assert stream.stats.layer_tokens_total == 6 * (3 + 2)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_layers_run_are_those_of_each_step(tiny_engine: Engine) -> None:
    done = tiny_engine.generate(PROMPT, max_new_tokens=40, threshold=0.6, max_pending=3)
    stats = done.stats
    state = tiny_engine.start([0.6, 0.6], 3)
    runs = [state.step(ids).segments_run for ids in [PROMPT, *([token] for token in done.tokens[:-1])]]
    assert stats.layers_run == [2 * segments for segments in runs]
    assert set(stats.layers_run) == {2, 4, 6}
    assert all(run >= exit_layer for run, exit_layer in zip(stats.layers_run, stats.exit_layer, strict=True))
    assert stats.layer_tokens_run == 2 * sum(state.lengths)
    assert stats.layer_tokens_total == 6 * state.length
    assert stats.total_exited + stats.remaining_tokens == 40


def test_a_short_answer_that_exits_never_runs_the_deep_layers(tiny_engine: Engine) -> None:
    stats = tiny_engine.generate(PROMPT, max_new_tokens=4, threshold=0.0, max_pending=100).stats
    assert stats.layers_run == [2, 2, 2, 2]
    assert (stats.layer_tokens_run, stats.layer_tokens_total) == (2 * 6, 6 * 6)
    assert stats.exit_rate == 1.0


def test_seconds_are_split_and_wait_for_nobody(tiny_engine: Engine) -> None:
    stream = tiny_engine.stream(PROMPT, max_new_tokens=3)
    next(stream)
    prefill = stream.stats.prefill_seconds
    assert prefill > 0
    assert stream.stats.decode_seconds == 0.0
    list(stream)
    assert stream.stats.prefill_seconds == prefill
    assert stream.stats.decode_seconds > 0


# --- several at once -------------------------------------------------------------------------------------------------


def test_eight_threads_on_one_engine_equal_one_by_one(tiny_engine: Engine) -> None:
    random = np.random.default_rng(9)
    requests = [
        {
            "ids": random.integers(0, 48, 1 + 3 * n).tolist(),
            "threshold": 0.3 + 0.08 * n,
            "max_pending": n,
            "temperature": 0.7 * (n % 2),
            "seed": n,
            "max_new_tokens": 60,
        }
        for n in range(8)
    ]
    alone = [tiny_engine.generate(**request) for request in requests]
    together: list[Generation | None] = [None] * 8
    start = threading.Barrier(8)

    def work(n: int) -> None:
        start.wait()
        together[n] = tiny_engine.generate(**requests[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert other is not None
        assert other.tokens == one.tokens
        assert other.stats.exit_layer == one.stats.exit_layer
        assert other.stats.layers_run == one.stats.layers_run


# --- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        (np.zeros(0, np.float32), "the prompt is empty"),
        ([1.0, 2.0], "flat list of whole numbers"),
        (["a"], "flat list of whole numbers"),
        ("text", "flat list of whole numbers"),
        ([[1, 2]], "flat list of whole numbers"),
        ([1, [2]], "flat list of whole numbers"),
        ([True, False], "flat list of whole numbers"),
        ([1, True], "flat list of whole numbers"),
        ([1, np.False_], "flat list of whole numbers"),
        (5, "flat list of whole numbers"),
        (None, "flat list of whole numbers"),
        ([2**70], "flat list of whole numbers"),
        ([1, 48], r"token id 48, outside the vocabulary 0\.\.47"),
        ([1, -1], r"token id -1, outside the vocabulary"),
        (np.array([2**64 - 1], np.uint64), "outside the vocabulary"),
        ([0] * 257, "has 257 tokens but the model's context holds 256"),
    ],
)
def test_bad_prompts_are_refused(tiny_engine: Engine, ids: object, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        tiny_engine.stream(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, not 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"mode": "greedy"}, "mode must be"),
        ({"threshold": 1.5}, "threshold must lie in"),
        ({"threshold": "0.5"}, r"threshold must lie in \[0, 1\], not '0.5'"),
        ({"threshold": object()}, "threshold must lie in"),
        ({"threshold": True}, r"threshold must lie in \[0, 1\], not True"),
        ({"threshold": [0.5, np.True_]}, "threshold must lie in"),
        ({"threshold": 10**400}, r"threshold must lie in \[0, 1\], not 1000"),
        ({"threshold": -(10**5000)}, r"threshold must lie in \[0, 1\], not this int"),
        ({"threshold": [[0.5], 0.5]}, r"threshold must lie in \[0, 1\], not \[0.5\]"),
        ({"threshold": float("nan")}, r"threshold must lie in \[0, 1\], not nan"),
        ({"mode": ["full"]}, "mode must be"),
        ({"mode": np.array(["full", "exit"])}, "mode must be"),
        ({"max_pending": 2**63}, "max_pending must be a whole number from 0 to 9223372036854775807, not 92"),
        ({"temperature": 10**400}, "temperature must be a number, not 1000"),
        ({"seed": np.array(1.5)}, "seed must be a whole number"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids holds token id -1, outside the vocabulary 0\.\.47"),
        ({"stop_token_ids": [3, 48]}, "stop_token_ids holds token id 48, outside the vocabulary"),
        ({"stop_token_ids": [3, True]}, "stop_token_ids must be a flat list"),
        ({"threshold": [0.5]}, "threshold has 1 values but the model has 2 checkpoints"),
        ({"threshold": np.array([0.5])}, "threshold has 1 values"),
        ({"min_layers": -1}, "min_layers"),
        ({"max_pending": -1}, "max_pending"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a flat list"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be a flat list"),
    ],
)
def test_bad_options_are_refused_before_any_work(tiny_engine: Engine, options: dict, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        tiny_engine.stream(PROMPT, **options)


def test_load_checks_the_files(tmp_path: Path, tiny: TinyModel) -> None:
    path = tiny.write(tmp_path / "b")
    content = bytearray((path / "model.onnx").read_bytes())
    content[content.index(tiny.weights()["head"].tobytes())] ^= 1  # a weight, so that only the hash can tell
    (path / "model.onnx").write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx' is corrupt"):
        load(path)
    load(path, verify=False)
