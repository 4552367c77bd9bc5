"""The ONNX network of a drafter equals the reference, row for row, for several sequences and after a rewind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from drafters import network_of, random_drafter
from ort_sessions import session_options

from tide_export.compose.drafter_networks import EMBEDDINGS, compose_drafter
from tide_export.drafting.files import QUANTIZATION, quantized
from tide_export.drafting.network import Cache
from tide_export.drafting.pieces import pieces_of
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.tensorrt.drafter_for_tensorrt import drafter_for_tensorrt
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names import paged, paged_drafter, segment_drafter, segment_networks
from tide_export.routers.drafter_weights import HEAD_DIM, Drafter

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
    reference, generator = network_of(drafter), np.random.default_rng(5)
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
            paged_drafter.HIDDEN_STATES: np.concatenate(states)[None],
            paged_drafter.POSITION_IDS: np.concatenate([one.rows + np.arange(count) for one, count in scheduled])[None],
            paged_drafter.LAST_TOKENS: ends - 1,
            paged_drafter.SEQUENCE_STARTS: np.array([0, *ends]),
            paged_drafter.SEQUENCE_LENGTHS: np.array([one.rows + count for one, count in scheduled]),
            paged_drafter.PAGE_TABLE: np.array([one.table for one, _ in scheduled], np.int32),
            **{paged.pages(0, kind): value for kind, value in pages.items()},
        }
        outputs = [paged_drafter.LOGITS, paged_drafter.NEW_HIDDEN_STATES, *(paged.new_pages(0, kind) for kind in pages)]
        logits, new_states, pages["key"], pages["value"] = session.run(outputs, feeds)
        for number, (one, count) in enumerate(scheduled):
            rows = reference.rows(torch.from_numpy(embeddings[number]), torch.from_numpy(states[number]), one.cache)
            one.cache, one.rows = rows.cache, one.rows + count
            np.testing.assert_allclose(logits[number], rows.logits[-1].numpy(), atol=3e-4)
            np.testing.assert_allclose(new_states[number], rows.hidden[-1].numpy(), atol=3e-4)
            assert isinstance(one.cache, Cache)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_the_network_beside_the_segments_equals_the_reference(weights: str, tmp_path: Path) -> None:
    """With K/V in buffers of three slots, of which a run takes some, padded on the right."""
    drafter, dtype = (
        random_drafter(STATE, EMBEDDING, TOKENS, bias=True),
        np.float16 if weights == "fp16" else np.float32,
    )
    file, capacity, rtol = tmp_path / "drafter.onnx", 48, 0.02 if weights == "fp16" else 1e-5
    ir.save(drafter_for_tensorrt(pieces_of(drafter, capacity), weights), file)
    session = onnxruntime.InferenceSession(str(file), session_options(), providers=["CPUExecutionProvider"])
    reference, generator = network_of(drafter), np.random.default_rng(5)
    buffers = {kind: np.zeros((3, drafter.shape.kv_heads, capacity, HEAD_DIM), dtype) for kind in ("key", "value")}
    caches: list[Cache | None] = [None] * 3
    for first, counts in [(0, (7, 20, 1)), (1, (2, 1)), (0, (1,)), (0, (5, 0, 3)), (2, (1,))]:
        tokens, slots = max(counts) + 1, slice(first, first + len(counts))
        embeddings = generator.standard_normal((len(counts), tokens, EMBEDDING)).astype(np.float32)
        states = 3 * generator.standard_normal((len(counts), tokens, STATE)).astype(np.float32)
        feeds = {
            EMBEDDINGS: embeddings.astype(dtype),
            segment_drafter.HIDDEN_STATES: states.astype(dtype),
            segment_drafter.TOKEN_INDICES: np.arange(tokens),
            segment_networks.KEY_INDICES: np.arange(capacity if first else 40),
            segment_drafter.PAST_LENGTHS: np.array([0 if cache is None else cache.rows for cache in caches[slots]]),
            segment_drafter.LAST_TOKENS: np.array([max(count - 1, 0) for count in counts]),
            **{segment_networks.past(0, kind): value[slots] for kind, value in buffers.items()},
        }
        buffered = [segment_networks.present(0, kind) for kind in ("key", "value")]
        outputs = [segment_drafter.LOGITS, segment_drafter.NEW_HIDDEN_STATES, *buffered]
        logits, new_states, buffers["key"][slots], buffers["value"][slots] = session.run(outputs, feeds)
        assert logits.dtype == np.float32
        for number, count in enumerate(counts):
            if not count:
                continue
            given = (torch.from_numpy(values[number, :count]) for values in (embeddings, states))
            rows = reference.rows(*given, caches[first + number])
            caches[first + number] = rows.cache
            for made, expected in ((logits, rows.logits), (new_states, rows.hidden)):
                scale = float(expected[-1].abs().max())
                np.testing.assert_allclose(made[number, 0], expected[-1].numpy(), atol=rtol * scale)
