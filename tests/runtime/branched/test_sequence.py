"""One sequence, step by step: memory is shared and not copied, buffers grow, and every step equals the plain model."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx.parser import parse_model
from tiny_model import HEAD_DIM, WIDTH, TinyModel

from tide_export import names
from tide_export.errors import GenerationError
from tide_export.runtime.branched.sequence import BranchedSequence
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import NEVER_EXIT


def random_ids(count: int, seed: int, vocabulary: int = 48) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


# --- what the state rests on -----------------------------------------------------------------------------------------


def test_this_onnxruntime_shares_memory_with_numpy() -> None:
    model = parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "add (float[1,N] x, int64 n) => (float[1,N] y, int64 m) {"
        " one = Constant<value = float[1] {1.0}>() y = Add(x, one) m = Identity(n) }"
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    array, scalar, copied = np.zeros((1, 3), np.float32), np.array(5), np.array(0)
    value = ort.OrtValue.ortvalue_from_numpy(array)
    assert value.data_ptr() == array.ctypes.data
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", value)  # in place
    binding.bind_ortvalue_input("n", ort.OrtValue.ortvalue_from_numpy(scalar))
    binding.bind_ortvalue_output("m", ort.OrtValue.ortvalue_from_numpy(copied))
    session.run_with_iobinding(binding)
    assert array.tolist() == [[1.0, 1.0, 1.0]]
    array[0, 1], scalar[()] = 10.0, 7  # written after binding, read by the next run
    session.run_with_iobinding(binding)
    assert array.tolist() == [[2.0, 11.0, 2.0]]
    assert copied == 7


def test_keys_and_values_are_written_in_place(tiny_engine: Engine) -> None:
    state = tiny_engine.start([NEVER_EXIT, NEVER_EXIT])
    state.step([1, 2, 3])
    for layer in range(6):
        past = state._kv.arrays[layer, "key"]
        assert (np.abs(past[0, 0, :3]).max(axis=1) > 0).all()
        assert not past[0, 0, 3:].any()
    address = {name: array.ctypes.data for name, array in state._kv.arrays.items()}
    kept = state._kv.arrays[5, "key"][0, 0, :3].copy()
    for token in range(20):
        state.step([token])
    assert {name: array.ctypes.data for name, array in state._kv.arrays.items()} == address
    assert (state._kv.arrays[5, "key"][0, 0, :3] == kept).all()
    assert state._kv.arrays[5, "key"][0, 0, :23].any(axis=1).all()


def test_a_skipped_segment_leaves_its_cache_alone(tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.0, 0.0], max_pending=4)
    state.step([1, 2])
    for layer in range(6):
        assert state._kv.arrays[layer, "value"].any() == (layer < 2)


# --- the step --------------------------------------------------------------------------------------------------------

CASES = [
    ([NEVER_EXIT, NEVER_EXIT], 4),
    ([0.0, 0.0], 0),
    ([0.0, 0.0], 5),
    ([0.5, 0.5], 0),
    ([0.5, 0.5], 3),
    ([0.5, 0.7], 16),
    ([0.8, 0.7], 1000),
    ([NEVER_EXIT, 0.65], 4),
    ([0.6, NEVER_EXIT], 4),
]


@pytest.mark.parametrize(("thresholds", "max_pending"), CASES)
@pytest.mark.parametrize("prompt", [1, 2, 7])
def test_every_step_equals_the_plain_model(
    tiny: TinyModel, tiny_engine: Engine, thresholds: list[float], max_pending: int, prompt: int
) -> None:
    ids = random_ids(60, seed=prompt)
    logits, exit_layers, scores = tiny.reference(ids, thresholds)
    state = tiny_engine.start(thresholds, max_pending, room=0)  # room 0: the buffers grow on the way
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, len(ids)))]:
        result = state.step(np.array(ids[start:stop], np.int32))
        np.testing.assert_allclose(result.logits, logits[stop - 1], atol=2e-5)
        assert result.exit_layer == exit_layers[stop - 1]
        reached = result.segments_run if result.segments_run < 3 else 2
        np.testing.assert_allclose(result.scores[:reached], scores[stop - 1, :reached], atol=1e-5)
        assert np.isnan(result.scores[reached:]).all()
        check_bookkeeping(state, result.segments_run, stop, max_pending)


def check_bookkeeping(state: BranchedSequence, segments_run: int, total: int, max_pending: int) -> None:
    assert state.length == total
    assert state.lengths[:segments_run] == [total] * segments_run
    assert state.lengths == sorted(state.lengths, reverse=True)
    waiting = [state._binding.io._bound_inputs[names.pending(k)].shape() for k in (1, 2)]
    assert waiting == [[1, count, WIDTH] for count in state.pending]
    assert max(state.pending) <= max_pending


@pytest.mark.parametrize("full_steps", [1, 3])
def test_exits_are_turned_off_and_on_along_a_sequence(tiny: TinyModel, tiny_engine: Engine, full_steps: int) -> None:
    """What waits takes another shape with every change, and where nothing can wait its binding is left alone."""
    ids = random_ids(40, seed=5)
    references = {
        values: tiny.reference(ids, list(values)) for values in ((0.0, 0.0), (NEVER_EXIT, NEVER_EXIT), (0.5, 0.65))
    }
    state = tiny_engine.start([NEVER_EXIT, NEVER_EXIT], max_pending=100)
    turns = (
        [(NEVER_EXIT, NEVER_EXIT)] * full_steps
        + [(0.0, 0.0)] * 2
        + [(NEVER_EXIT, NEVER_EXIT)] * full_steps
        + [(0.5, 0.65)] * 3
    )
    for t, token in enumerate(ids):
        values = turns[t % len(turns)]
        state.set_thresholds(values)
        result = state.step([token])
        logits, exit_layers, _ = references[values]
        np.testing.assert_allclose(result.logits, logits[t], atol=2e-5)
        assert result.exit_layer == exit_layers[t]
        check_bookkeeping(state, result.segments_run, t + 1, 100)


def test_a_state_outlives_its_engine(tiny: TinyModel, tiny_bundle: Path) -> None:
    state = load(tiny_bundle).start([0.5, 0.5])
    state.step([1, 2, 3])
    result = state.step([4])
    np.testing.assert_allclose(result.logits, tiny.reference([1, 2, 3, 4], [0.5, 0.5])[0][-1], atol=2e-5)


def test_a_graph_without_checkpoints(tmp_path: Path) -> None:
    full = TinyModel(checkpoints=())
    engine = load(full.write(tmp_path / "full"))
    state = engine.start([])
    ids = random_ids(20, seed=4)
    for t, token in enumerate(ids):
        result = state.step([token])
        np.testing.assert_allclose(result.logits, full.reference(ids, [])[0][t], atol=2e-5)
        assert (result.exit_layer, result.segments_run, result.scores.shape) == (6, 1, (0,))
    assert (state.lengths, state.pending) == ([20], [])


def test_where_keys_and_values_are_propagated_max_pending_forces_nothing(tiny_llama) -> None:
    state = tiny_llama.graph(tiny_llama.propagating).start([0.0] * 2, max_pending=0)
    assert state.step([1, 2]).segments_run == 3
    assert state.step([3]).segments_run == 1


# --- growth and limits -----------------------------------------------------------------------------------------------


def test_buffers_grow_by_doubling_and_stop_at_the_context(tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.5, 0.5], room=4)
    assert state.capacity == 0
    state.step([1, 2, 3])
    capacities = [state.capacity]
    for t in range(256 - 3):
        state.step([t % 48])
        if state.capacity != capacities[-1]:
            assert state.length == capacities[-1] + 1
            capacities.append(state.capacity)
    assert capacities == [7, 14, 28, 56, 112, 224, 256]
    assert state._kv.arrays[0, "key"].shape == (1, 1, 256, HEAD_DIM)
    with pytest.raises(GenerationError, match="would have 257 tokens but the model's context holds 256"):
        state.step([1])
    assert state.length == 256


def test_a_long_prompt_gets_what_it_needs_at_once(tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.5, 0.5], room=8)
    state.step(random_ids(200, seed=5))
    assert state.capacity == 208


def test_a_model_without_a_context_limit_grows_on(tmp_path: Path) -> None:
    endless = TinyModel(layers=2, checkpoints=(1,), context=None)
    state = load(endless.write(tmp_path / "b")).start([0.5], room=1)
    ids = random_ids(300, seed=6)
    for token in ids:
        result = state.step([token])
    np.testing.assert_allclose(result.logits, endless.reference(ids, [0.5])[0][-1], atol=5e-5)
    assert state.capacity == 512


def test_no_memory_for_the_cache_is_one_sentence(
    tiny: TinyModel, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tiny_engine.start([0.5, 0.5], room=0)
    state.step([1, 2, 3])
    zeros, calls = np.zeros, iter(range(100))

    def scarce(shape: tuple[int, ...], dtype: type) -> np.ndarray:
        if next(calls) == 5:  # some layers have grown already
            raise MemoryError
        return zeros(shape, dtype)

    monkeypatch.setattr(np, "zeros", scarce)
    with pytest.raises(GenerationError, match="K/V cache of 6 tokens"):
        state.step([4])
    monkeypatch.undo()
    result = state.step([4])  # with memory again the sequence goes on as if nothing had happened
    np.testing.assert_allclose(result.logits, tiny.reference([1, 2, 3, 4], [0.5, 0.5])[0][-1], atol=2e-5)


def test_a_failed_run_leaves_the_state_usable(tiny: TinyModel, tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.5, 0.5], max_pending=4)
    state.step([1, 2, 3])
    with pytest.raises(GenerationError, match="indices element out of data bounds") as error:
        state.step([1000])
    assert "\n" not in str(error.value)
    result = state.step([4])
    np.testing.assert_allclose(result.logits, tiny.reference([1, 2, 3, 4], [0.5, 0.5])[0][-1], atol=2e-5)


def test_a_step_needs_a_token(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match="at least one token"):
        tiny_engine.start([0.5, 0.5]).step([])


def test_start_wants_one_threshold_per_checkpoint(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match="1 thresholds for 2 checkpoints"):
        tiny_engine.start([0.5])
    with pytest.raises(GenerationError, match="a threshold must be a number"):
        tiny_engine.start(["x", 0.5])


# --- verifying and undoing -------------------------------------------------------------------------------------------


def test_a_full_step_lets_nothing_exit_and_catches_up_with_logits_of_all_that_waited(
    tiny: TinyModel, tiny_engine: Engine
) -> None:
    ids = random_ids(12, seed=8)
    state = tiny_engine.start([0.0, 0.0], max_pending=100)
    for token in ids[:-1]:
        assert state.step([token], logits_to_keep=3).position_logits.shape == (1, 48)  # it left: its own logits alone
    result = state.step(ids[-1:], logits_to_keep=len(ids), full=True)
    assert (result.exit_layer, result.segments_run) == (6, 3)
    np.testing.assert_allclose(result.position_logits, tiny.reference(ids, [NEVER_EXIT, NEVER_EXIT])[0], atol=2e-5)
    np.testing.assert_array_equal(result.logits, result.position_logits[-1])
    assert state.step([1]).exit_layer == 2  # the thresholds are what they were


def test_no_more_logits_come_than_the_last_segment_had_tokens(tiny: TinyModel, tiny_engine: Engine) -> None:
    state = tiny_engine.start([NEVER_EXIT, NEVER_EXIT])
    np.testing.assert_allclose(
        state.step([5, 6, 7], 9).position_logits, tiny.reference([5, 6, 7], [NEVER_EXIT, NEVER_EXIT])[0], atol=2e-5
    )
    assert tiny_engine.start([NEVER_EXIT, NEVER_EXIT]).step([5, 6, 7]).position_logits.shape == (1, 48)
    assert state.step([8], 9).position_logits.shape == state.step([9]).position_logits.shape == (1, 48)


def test_what_still_waits_after_a_rewind_is_memory_of_its_own(tiny_engine: Engine) -> None:
    """A view of what waited would be of memory that is freed with it: right by luck, for a while."""
    state = tiny_engine.start([0.0, 0.0], max_pending=1000)
    state.step(random_ids(40, seed=11))
    before = state._pending[0].data_ptr()
    state.rewind(30)
    assert state.pending == [30, 0]
    assert state._pending[0].data_ptr() != before


def test_a_sequence_is_rewound_to_what_it_has_been(tiny_engine: Engine) -> None:
    state = tiny_engine.start([0.5, 0.5])
    state.step([1, 2])
    for length in (-1, 3):
        with pytest.raises(GenerationError, match=f"2 tokens cannot be rewound to {length}"):
            state.rewind(length)
    state.rewind(0)
    assert state.length == 0
