"""Collecting: the right states of the right tokens, padding never used, memory independent of the text."""

import copy
import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch

from tide_export.calibration import hidden_store as store
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError
from tide_export.model.source import wrap_model

LAYERS = (3, 9, 12)


def config(**options):
    return TideConfig.from_options(**options)


def reference(source, sequences):
    """Raw states of all tokens, one sequence at a time, nothing padded: {layers: [tokens, D]}."""
    found = {layers: [] for layers in LAYERS}
    for sequence in sequences:
        states = source.run(torch.from_numpy(sequence.ids).long()[None], LAYERS)
        for layers in LAYERS:
            found[layers].append(states.raw[layers][0])
    return {layers: torch.cat(parts) for layers, parts in found.items()}


def token_numbers(sample, sequences):
    """Which token of the text, counted through, is in each slot."""
    starts = np.cumsum([0, *(len(sequence.ids) for sequence in sequences)])
    return starts[sample.locations[:, 0]] + sample.locations[:, 1].numpy()


@pytest.mark.parametrize("capacity", [10_000, 100])
@pytest.mark.parametrize("in_folder", [False, True])
def test_every_slot_holds_its_tokens_states(demo, sequences, tmp_path, capacity, in_folder):
    ragged = [TokenSequence(s.document, s.ids[: 5 + 7 * n]) for n, s in enumerate(sequences[:6])]
    expected = reference(demo, ragged)
    tokens = sum(len(s.ids) for s in ragged)
    folder = tmp_path / "new" / "cache" if in_folder else None
    sample = collect(demo, ragged, LAYERS, config(calibration_batch=4), capacity, "test", folder)
    assert sample.seen == tokens
    assert sample.kept == min(capacity, tokens)
    numbers = token_numbers(sample, ragged)
    assert len(set(numbers)) == sample.kept
    assert set(sample.raw) == set(LAYERS)
    for layers in LAYERS:
        found = sample.raw[layers]
        assert (found.shape, found.dtype, found.device.type) == ((sample.kept, 128), torch.float32, "cpu")
        assert torch.allclose(found, expected[layers][numbers], atol=1e-3)
        assert not torch.allclose(found, expected[layers][numbers - 1], atol=1e-1)
    ids = np.concatenate([s.ids for s in ragged])
    for slot, (number, position) in enumerate(sample.locations.tolist()):
        assert sample.documents[slot] == ragged[number].document
        last = position == len(ragged[number].ids) - 1
        assert sample.next_ids[slot] == (-1 if last else ids[numbers[slot] + 1])


def test_folder_and_memory_give_the_same_bits(demo, sequences, tmp_path):
    in_memory = collect(demo, sequences, LAYERS, config(), 200, "test")
    in_folder = collect(demo, sequences, LAYERS, config(), 200, "test", tmp_path)
    assert all(torch.equal(in_memory.raw[layers], in_folder.raw[layers]) for layers in LAYERS)


def test_an_interrupted_run_resumes_to_the_same_bits(demo, sequences, tmp_path, monkeypatch):
    expected = collect(demo, sequences, LAYERS, config(calibration_batch=2), 200, "test")
    put, calls = store.FolderStore.put, [0]

    def interrupt(*args):
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        put(*args)

    monkeypatch.setattr(store.FolderStore, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        collect(demo, sequences, LAYERS, config(calibration_batch=2), 200, "test", tmp_path)
    found = collect(demo, sequences, LAYERS, config(calibration_batch=2), 200, "test", tmp_path)
    assert calls[0] == 4 + 3  # three of six batches were done
    assert all(torch.equal(found.raw[layers], expected.raw[layers]) for layers in LAYERS)


def collected(folder, source, text, seed=0, batch=2, capacity=200, layers=LAYERS):
    return collect(source, text, layers, config(seed=seed, calibration_batch=batch), capacity, "test", folder)


@pytest.fixture(scope="module")
def kept(demo, sequences, tmp_path_factory):
    """A folder that one calibration has filled."""
    folder = tmp_path_factory.mktemp("kept")
    collected(folder, demo, sequences)
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "plan_sha256"),
        ({"batch": 3}, r"batches, plan_sha256"),
        ({"capacity": 199}, "kept, plan_sha256"),
        ({"layers": (3, 12)}, "layers"),
        ({"text": 11}, "plan_sha256, seen"),
        ({"source": 1}, "weights_sha256"),
    ],
)
def test_folder_of_another_plan(demo, sequences, kept, change, named):
    given = {"source": demo, "text": sequences} | change
    if "source" in change:
        given["source"] = dataclasses.replace(demo, weights_sha256="0" * 64)
    if "text" in change:
        given["text"] = sequences[:11]
    with pytest.raises(CalibrationError, match=rf"another calibration \(another {named}\)"):
        collected(kept, **given)


def test_ten_times_the_text_takes_no_more_memory(demo, sequences):
    def peak(text):
        tracemalloc.start()
        sample = collect(demo, text, (6,), config(), 256, "test")
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size, sum(state.nbytes for state in sample.raw.values())

    small, large = peak(sequences), peak(sequences * 10)
    assert large[1] == small[1] == 256 * demo.hidden_size * 4
    assert large[0] < small[0] + 200_000


def test_only_kept_states_leave_the_pass(demo, sequences, monkeypatch):
    """Neither logits nor the states of other tokens are made into anything."""
    monkeypatch.setattr(type(demo), "head", lambda *_: pytest.fail("the head ran"))
    monkeypatch.setattr(type(demo), "normalize", lambda *_: pytest.fail("the norm ran"))
    rows = []
    raw_hidden = type(demo).raw_hidden

    def spy(*args):
        states = raw_hidden(*args)
        rows.append(len(states[12]))
        return states

    monkeypatch.setattr(type(demo), "raw_hidden", spy)
    collect(demo, sequences, LAYERS, config(), 64, "test")
    assert sum(rows) == 64


def break_after_layer_5(source):
    broken = wrap_model(copy.deepcopy(source.model), "broken")
    broken.structure.layers[4].register_forward_hook(
        lambda module, args, output: (output[0] * float("nan"),) if isinstance(output, tuple) else output * float("nan")
    )
    return broken


def test_nan_in_a_hidden_state(sequences, demo):
    with pytest.raises(CalibrationError, match="'broken' gives NaN or infinity in its hidden state after layer 9"):
        collect(break_after_layer_5(demo), sequences, LAYERS, config(), 100, "test")


def test_tokenizer_of_another_model(demo):
    with pytest.raises(CalibrationError, match="token id 4096"):
        collect(demo, [TokenSequence(0, np.array([1, 4096], np.int32))], LAYERS, config(), 100, "test")


@pytest.mark.parametrize("text", [[], [TokenSequence(0, np.array([], np.int32))]])
def test_text_without_a_token(demo, text):
    with pytest.raises(CalibrationError, match="no usable token"):
        collect(demo, text, LAYERS, config(), 100, "test")
