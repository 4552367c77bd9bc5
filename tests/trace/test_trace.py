"""Tracing: every attention op and marker comes through in order, or it fails. Families: tests/parity."""

import pytest
import torch
from families import build
from tiny_configs import small_llama
from transformers import LlamaForCausalLM

from tide_export.errors import TraceError, UnsupportedModelError
from tide_export.model.source import SourceModel, wrap_model
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_MARKER
from tide_export.trace import tracer
from tide_export.trace.attention.masks import refuse_additions
from tide_export.trace.tracer import trace


def two_layers() -> SourceModel:
    torch.manual_seed(0)
    config = small_llama(vocab_size=64, width=32, layers=2, context=64)
    return wrap_model(LlamaForCausalLM._from_config(config, attn_implementation="eager"), "tiny")


def test_markers_and_attention_are_traced_in_order_and_the_model_is_unchanged() -> None:
    source, ids = two_layers(), torch.arange(5, 25)[None]
    before = source.model(ids).logits
    traced = trace(source, (1,))
    ours = [node for node in traced.model.graph if node.domain == DOMAIN]
    layers = [n.attributes["layer"].as_int() for n in ours if n.op_type == OP_ATTENTION]
    markers = [n.attributes["layer"].as_int() for n in ours if n.op_type == OP_MARKER]
    assert layers == [0, 1]
    assert markers == [0, 1, 2, 3]
    assert traced.boundaries == (0, 1, 2)
    assert source.model.config._attn_implementation == "eager"
    assert torch.equal(source.model(ids).logits, before)


def test_a_lost_marker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tracer._markers
    monkeypatch.setattr(tracer, "_markers", lambda source, bounds: real(source, (0, *bounds[2:])))
    with pytest.raises(TraceError, match=r"markers \[0, 2, 3\] instead of \[0, 1, 2, 3\]"):
        trace(two_layers(), (1,))


def test_a_position_bias_that_is_not_by_distance_is_refused() -> None:
    source = build("inkling (text)")
    for layer in source.structure.layers:
        layer.self_attn.rel_logits_proj.rel_extent = torch.tensor(8)  # so that it is not known what the bias means
    with pytest.raises(UnsupportedModelError, match="InklingAttention attends with a position bias, which cannot be"):
        trace(source, (1, 2))


def test_sinks_that_each_token_computes_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear attends with sinks of each token, which cannot be"):
        refuse_additions(torch.nn.Linear(1, 1), {"sinks": torch.zeros(1, 4, 3, 1)})
