"""Tracing: every attention op and marker comes through in order, or it fails. Families: tests/parity."""

import pytest
import torch

from tide_export.errors import TraceError
from tide_export.names import DOMAIN, OP_ATTENTION, OP_CHECKPOINT
from tide_export.trace import tracer
from tide_export.trace.tracer import trace


def test_markers_and_attention_are_traced_in_order_and_the_model_is_left_as_it_was(demo_source) -> None:
    ids = torch.arange(5, 25)[None]
    before = demo_source.model(ids).logits
    traced = trace(demo_source, (3, 6, 9))
    ours = [node for node in traced.model.graph if node.domain == DOMAIN]
    layers = [n.attributes["layer"].as_int() for n in ours if n.op_type == OP_ATTENTION]
    markers = [n.attributes["layer"].as_int() for n in ours if n.op_type == OP_CHECKPOINT]
    assert layers == list(range(12))
    assert markers == [0, 3, 6, 9, 12, 13]
    assert traced.boundaries == (0, 3, 6, 9, 12)
    assert demo_source.model.config._attn_implementation == "eager"
    assert torch.equal(demo_source.model(ids).logits, before)


def test_a_lost_marker_is_an_error(demo_source, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tracer._markers
    monkeypatch.setattr(tracer, "_markers", lambda source, bounds: real(source, (0, *bounds[2:])))
    with pytest.raises(TraceError, match=r"checkpoints \[0, 6, 12, 13\] instead of \[0, 3, 6, 12, 13\]"):
        trace(demo_source, (3, 6))
