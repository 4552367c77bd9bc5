"""The ONNX network of a drafter equals the reference, row for row, for several sequences and after a rewind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from drafters import random_drafter
from ort_sessions import session_options

from tide_export import names
from tide_export.compose.drafter import EMBEDDINGS, compose_drafter
from tide_export.drafting.files import QUANTIZATION, quantized
from tide_export.drafting.network import Cache, DrafterNetwork
from tide_export.drafting.pieces import pieces_of
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.routers.drafter import HEAD_DIM, Drafter

STATE, EMBEDDING, PAGE_TOKENS = 192, 128, 16
TOKENS = np.arange(3, 83, 2)


class Sequence:
    """A sequence in the reference, and in pages of the network's."""

    def __init__(self, pages: list[int]) -> None:
        self.table, self.cache, self.rows = pages, None, 0
        self.embeddings = np.zeros((0, EMBEDDING), np.float32)
        self.states = np.zeros((0, STATE), np.float32)


def dequantized(drafter: Drafter, weights: QuantizedWeights) -> Drafter:
    """The drafter that the network computes, up to the rounding of inputs."""
    values = {name: blocks.values() for name, blocks in weights.blocks.items()}
    arrays = dict(drafter.arrays) | {name: values[name] for name in ("fuse", "out", "down")}
    arrays["qkv"] = np.concatenate([values[name] for name in "qkv"])
    arrays["gate_up"] = np.concatenate([values["gate"], values["up"]])
    return replace(drafter, arrays=arrays, head=values["head"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_several_sequences_equal_the_reference(bits: int, bias: bool, tmp_path: Path) -> None:
    drafter = random_drafter(STATE, EMBEDDING, TOKENS, bias)
    pieces = pieces_of(drafter, 64)
    weights = quantized(pieces, replace(QUANTIZATION, bits=bits, accuracy_level=1))  # inputs stay float32
    model = lower_for_onnxruntime(compose_drafter(pieces), weights)
    drafter = dequantized(drafter, weights)
    file = tmp_path / "drafter.onnx"
    ir.save(model, file)
    session = onnxruntime.InferenceSession(str(file), session_options(), providers=["CPUExecutionProvider"])
    reference, generator = DrafterNetwork.from_drafter(drafter), np.random.default_rng(5)
    pages = {
        kind: np.zeros((8, drafter.shape.kv_heads, PAGE_TOKENS, HEAD_DIM), np.float32) for kind in ("key", "value")
    }
    sequences = [Sequence([5, 1, 7]), Sequence([2, 0, 3])]
    # New rows of each; before the third run the last row of the first sequence is taken back.
    for run, counts in enumerate([(7, 20), (1, 1), (3, 0), (1, 4)]):
        if run == 2:
            sequences[0].cache = sequences[0].cache.first(7)
            sequences[0].rows = 7
        scheduled = [(one, count) for one, count in zip(sequences, counts, strict=True) if count]
        embeddings = [generator.standard_normal((count, EMBEDDING)).astype(np.float32) for _, count in scheduled]
        states = [3 * generator.standard_normal((count, STATE)).astype(np.float32) for _, count in scheduled]
        ends = np.cumsum([count for _, count in scheduled])
        feeds = {
            EMBEDDINGS: np.concatenate(embeddings)[None],
            names.HIDDEN_STATES: np.concatenate(states)[None],
            names.POSITION_IDS: np.concatenate([one.rows + np.arange(count) for one, count in scheduled])[None],
            names.LAST_TOKENS: ends - 1,
            names.SEQUENCE_STARTS: np.array([0, *ends]),
            names.SEQUENCE_LENGTHS: np.array([one.rows + count for one, count in scheduled]),
            names.PAGE_TABLE: np.array([one.table for one, _ in scheduled], np.int32),
            **{names.pages(0, kind): value for kind, value in pages.items()},
        }
        outputs = [names.LOGITS, names.NEW_HIDDEN_STATES, names.new_pages(0, "key"), names.new_pages(0, "value")]
        logits, new_states, pages["key"], pages["value"] = session.run(outputs, feeds)
        for number, (one, count) in enumerate(scheduled):
            rows = reference.rows(torch.from_numpy(embeddings[number]), torch.from_numpy(states[number]), one.cache)
            one.cache, one.rows = rows.cache, one.rows + count
            np.testing.assert_allclose(logits[number], rows.logits[-1].numpy(), atol=3e-4)
            np.testing.assert_allclose(new_states[number], rows.states[-1].numpy(), atol=3e-4)
            assert isinstance(one.cache, Cache)
