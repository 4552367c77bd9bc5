"""One sequence that is stepped by hand: every step equals the plain model, buffers grow, and what is wrong changes
nothing. What one step can cost is bounded, whatever the text."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_model import TinyModel

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.stepping import SingleSequence
from tide_export.thresholds.resolve import NEVER_EXIT

NEVER = [NEVER_EXIT, NEVER_EXIT]


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 48, count).tolist()


# --- steps -----------------------------------------------------------------------------------------------------------

CASES = [
    (NEVER, 4),
    ([0.0, 0.0], 0),
    ([0.0, 0.0], 5),
    ([0.5, 0.5], 0),
    ([0.5, 0.5], 3),
    ([0.8, 0.7], 1000),
    ([NEVER_EXIT, 0.65], 4),
    ([0.6, NEVER_EXIT], 4),
]


@pytest.mark.parametrize(("thresholds", "max_pending"), CASES)
@pytest.mark.parametrize("counts", [[1] * 60, [2, *[1] * 58], [3, 1, 1, 5, 1, 9, *[1] * 24, 2, *[1] * 14]])
def test_every_step_equals_the_plain_model(
    tiny: TinyModel, tiny_engine: Engine, thresholds: list[float], max_pending: int, counts: list[int]
) -> None:
    ids = random_ids(60, seed=len(counts))
    logits, exit_layers, scores = tiny.reference(ids, thresholds)
    state, stop = tiny_engine.start(thresholds, max_pending), 0
    for count in counts:
        stop += count
        result = state.step(np.array(ids[stop - count : stop], np.int32))
        np.testing.assert_allclose(result.logits, logits[stop - 1], atol=2e-5)
        assert result.exit_layer == exit_layers[stop - 1]
        asked = (np.array(tiny.checkpoints) <= exit_layers[stop - 1]) & (np.array(thresholds) <= 1)
        np.testing.assert_allclose(result.scores, np.where(asked, scores[stop - 1], np.nan), atol=1e-5)
        check_counts(state, result.segments_run, stop, max_pending)


def check_counts(state: SingleSequence, segments_run: int, total: int, max_pending: int) -> None:
    assert state.length == total
    assert state.lengths[:segments_run] == [total] * segments_run
    assert state.lengths == sorted(state.lengths, reverse=True)
    assert max(state.pending) <= max_pending


@pytest.mark.parametrize("full_steps", [1, 3])
def test_exits_are_turned_off_and_on_along_a_sequence(tiny: TinyModel, tiny_engine: Engine, full_steps: int) -> None:
    ids, never, always, some = random_ids(40, seed=5), (NEVER_EXIT, NEVER_EXIT), (0.0, 0.0), (0.5, 0.65)
    references = {values: tiny.reference(ids, list(values)) for values in (never, always, some)}
    state = tiny_engine.start(never, max_pending=100)
    turns = [never] * full_steps + [always] * 2 + [never] * full_steps + [some] * 3
    for t, token in enumerate(ids):
        values = turns[t % len(turns)]
        state.set_thresholds(values)
        result = state.step([token])
        logits, exit_layers, _ = references[values]
        np.testing.assert_allclose(result.logits, logits[t], atol=2e-5)
        assert result.exit_layer == exit_layers[t]
        check_counts(state, result.segments_run, t + 1, 100)


def test_a_full_step_catches_up_with_logits_of_all_that_was_pending(tiny: TinyModel, tiny_engine: Engine) -> None:
    ids = random_ids(12, seed=8)
    state = tiny_engine.start([0.0, 0.0], max_pending=100)
    for token in ids[:-1]:
        assert state.step([token], logits_to_keep=3).position_logits.shape == (1, 48)  # it left: its own logits alone
    result = state.step(ids[-1:], logits_to_keep=len(ids), full=True)
    assert (result.exit_layer, result.segments_run) == (6, 3)
    np.testing.assert_allclose(result.position_logits, tiny.reference(ids, NEVER)[0], atol=2e-5)
    np.testing.assert_array_equal(result.logits, result.position_logits[-1])
    assert state.step([1]).exit_layer == 2, "the thresholds are what they were"


def test_no_more_logits_come_than_the_last_segment_had_tokens(tiny: TinyModel, tiny_engine: Engine) -> None:
    state = tiny_engine.start(NEVER)
    np.testing.assert_allclose(state.step([5, 6, 7], 9).position_logits, tiny.reference([5, 6, 7], NEVER)[0], atol=2e-5)
    assert tiny_engine.start(NEVER).step([5, 6, 7]).position_logits.shape == (1, 48)
    assert state.step([8], 9).position_logits.shape == state.step([9]).position_logits.shape == (1, 48)


def test_a_sequence_outlives_its_engine(tiny: TinyModel, tiny_bundle: Path) -> None:
    state = load(tiny_bundle).start([0.5, 0.5])
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    state.step([1, 2, 3])
    result = state.step([4])
    np.testing.assert_allclose(result.logits, tiny.reference([1, 2, 3, 4], [0.5, 0.5])[0][-1], atol=2e-5)


def test_a_graph_without_checkpoints(tmp_path: Path) -> None:
    full = TinyModel(checkpoints=())
    state, ids = load(full.write(tmp_path / "full")).start([]), random_ids(20, seed=4)
    for t, token in enumerate(ids):
        result = state.step([token])
        np.testing.assert_allclose(result.logits, full.reference(ids, [])[0][t], atol=2e-5)
        assert (result.exit_layer, result.segments_run, result.scores.shape) == (6, 1, (0,))
    assert (state.lengths, state.pending) == ([20], [])


# --- growth, limits and mistakes -------------------------------------------------------------------------------------


def test_a_sequence_ends_at_the_context(tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.5, 0.5])
    for t in range(256):
        state.step([t % 48])
    with pytest.raises(GenerationError, match="would have 257 tokens but the model's context holds 256"):
        state.step([1])
    assert state.length == 256


def test_a_model_without_a_context_limit_grows_on(tmp_path: Path) -> None:
    endless = TinyModel(layers=2, checkpoints=(1,), context=None)
    engine, ids = load(endless.write(tmp_path / "b")), random_ids(300, seed=6)
    state = engine.start([0.5])
    for token in ids:
        result = state.step([token])
    np.testing.assert_allclose(result.logits, endless.reference(ids, [0.5])[0][-1], atol=5e-5)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda state: state.step([]), "a step needs at least one token"),
        (lambda state: state.step([1, 48]), r"a step holds token id 48, outside the vocabulary 0\.\.47"),
        (lambda state: state.step([-1]), "a step holds token id -1, outside the vocabulary"),
        (lambda state: state.step([1] * 248), "would have 257 tokens but the model's context holds 256"),
        (lambda state: state.step([1.5]), "a step must be a flat list of whole numbers"),
        (lambda state: state.step([1], logits_to_keep=0), "logits_to_keep must be a whole number, 1 or more, not 0"),
        (lambda state: state.rewind(-1), "a sequence of 9 tokens cannot be rewound to -1"),
        (lambda state: state.rewind(10), "a sequence of 9 tokens cannot be rewound to 10"),
        (lambda state: state.set_thresholds([0.5]), "1 thresholds for 2 checkpoints"),
        (lambda state: state.set_thresholds([0.5, np.nan]), "a threshold must be a number, not nan"),
    ],
)
def test_what_is_refused_changes_nothing(
    tiny: TinyModel, tiny_engine: Engine, step: Callable[[SingleSequence], object], sentence: str
) -> None:
    state, ids = tiny_engine.start([0.5, 0.5], 4), random_ids(20, seed=2)
    state.step(ids[:9])
    before = state.lengths
    with pytest.raises(GenerationError, match=sentence):
        step(state)
    assert state.lengths == before
    logits, exit_layers, _ = tiny.reference(ids, [0.5, 0.5])
    result = state.step(ids[9:])
    assert result.exit_layer == exit_layers[-1]
    np.testing.assert_allclose(result.logits, logits[-1], atol=2e-5)
    state.rewind(0)
    assert state.length == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([0.5],), "1 thresholds for 2 checkpoints"),
        ((["x", 0.5],), "a threshold must be a number"),
        (([0.5, float("nan")],), "a threshold must be a number, not nan"),
        (([0.5, 0.5], -1), "max_pending must be a whole number, 0 or more, not -1"),
    ],
)
def test_a_sequence_that_cannot_be_started(tiny_engine: Engine, arguments: tuple, sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        tiny_engine.start(*arguments)


# --- the weights -----------------------------------------------------------------------------------------------------


def mappings(bundle: Path) -> int:
    gc.collect(1)
    return Path("/proc/self/maps").read_text().count(f"{bundle}/{WEIGHTS_FILE}")


def test_engines_share_the_file_until_they_are_gone(wide_bundle: Path) -> None:
    engines = [load(wide_bundle, threads=1) for _ in range(2)]
    assert mappings(wide_bundle) == 2
    first = engines[0].generate([1, 2, 3], max_new_tokens=4).tokens
    del engines[0]
    assert mappings(wide_bundle) == 1
    assert engines[0].generate([1, 2, 3], max_new_tokens=4).tokens == first
    engines.clear()
    assert mappings(wide_bundle) == 0


def test_where_weights_cannot_be_shared_they_are_copied(
    wide_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For ONNX Runtime they must seem to be in an empty file, for which there is no temporary folder."""
    expected = load(wide_bundle, threads=1).generate([1, 2, 3], max_new_tokens=4).tokens
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    engine = load(wide_bundle, threads=1, verify=False)
    assert mappings(wide_bundle) == 0
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == expected


def test_no_sequence_starts_on_weights_that_were_changed(wide_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(wide_bundle, tmp_path / "bundle")
    engine = load(bundle, threads=1)
    engine.start(NEVER).step([1])
    with (bundle / WEIGHTS_FILE).open("r+b") as stream:
        stream.write(np.ones(4, np.float32).tobytes())
    for refused in (lambda: engine.start(NEVER), lambda: engine.generate([1], max_new_tokens=1)):
        with pytest.raises(BundleError, match=f"{WEIGHTS_FILE}' was changed after the bundle was loaded"):
            refused()


# --- what a step can cost: the bound of docs/architecture/lazy-depth.md -----------------------------------------------

LAYERS = np.array([2, 2, 2])  # of each segment
STEPS = 40


@pytest.fixture(scope="module")
def dividing(tiny: TinyModel) -> list[float]:
    """Thresholds that some of the scores on random text exceed: half at the first checkpoint, few at the second."""
    scores = tiny.reference(random_ids(200, seed=0), [2.0, 2.0])[2]
    return [float(np.quantile(scores[:, 0], 0.5)), float(np.quantile(scores[:, 1], 0.95))]


def searched(tiny: TinyModel, thresholds: list[float], exits: Callable[[int], bool]) -> list[int]:
    """A text of which token `number` exits at the first checkpoint if `exits(number)`, else runs every layer."""
    random, text = np.random.default_rng(1), list[int]()
    for number in range(STEPS):
        wanted = 2 if exits(number) else 6
        candidates = ([*text, token] for token in random.permutation(48).tolist())
        text = next(ids for ids in candidates if tiny.reference(ids, thresholds)[1][-1] == wanted)
    return text


def layers_computed(sequence: SingleSequence, ids: list[int]) -> int:
    """Tokens times layers that a step computes."""
    before = np.array(sequence.lengths)
    sequence.step(ids)
    return int((np.array(sequence.lengths) - before) @ LAYERS)


def bound(new: int, max_pending: int) -> int:
    """Tokens times layers of a step over `new` tokens."""
    return int(new * LAYERS[0] + (max_pending + new) * LAYERS[1:].sum())


@pytest.mark.parametrize("max_pending", [0, 1, 4, 16])
def test_the_longest_step_and_how_often_it_comes(
    tiny: TinyModel, tiny_engine: Engine, dividing: list[float], max_pending: int
) -> None:
    """Texts are searched of which all tokens exit, none does, or the longest catch-up comes."""
    every = max_pending + 1
    for exits, bursts in (
        (lambda number: True, STEPS // every),
        (lambda number: False, STEPS if max_pending == 0 else 0),
        (lambda number: number % every != max_pending, STEPS // every),  # exits for as long as they may be pending
    ):
        sequence = tiny_engine.start(dividing, max_pending)
        costs = [layers_computed(sequence, [token]) for token in searched(tiny, dividing, exits)]
        assert max(costs) <= bound(1, max_pending)
        assert costs.count(bound(1, max_pending)) == bursts
        assert sum(costs) <= STEPS * LAYERS.sum(), "catching up computes nothing twice"


@pytest.mark.parametrize("max_pending", [0, 3])
def test_steps_of_several_tokens(tiny_engine: Engine, max_pending: int) -> None:
    sequence, random = tiny_engine.start([0.0, 0.0], max_pending), np.random.default_rng(2)
    steps = [random.integers(0, 48, new).tolist() for new in random.integers(1, 8, 30)]
    assert max(layers_computed(sequence, ids) / bound(len(ids), max_pending) for ids in steps) == 1.0
