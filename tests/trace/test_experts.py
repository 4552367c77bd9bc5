"""Experts emit symbols only while a trace is open."""

import pytest
from families import build
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tide_export.trace.experts import IMPLEMENTATION, symbolic_experts


def fail_in_a_trace(model) -> None:
    with symbolic_experts(model):
        assert IMPLEMENTATION in model.get_experts_implementation().values()
        assert IMPLEMENTATION in ALL_EXPERTS_FUNCTIONS
        raise RuntimeError("in the trace")


def test_the_function_is_there_while_the_trace_is_open_and_the_model_is_unchanged() -> None:
    model = build("mixtral").model
    before = model.get_experts_implementation()
    with pytest.raises(RuntimeError, match="in the trace"):
        fail_in_a_trace(model)
    assert model.get_experts_implementation() == before
    assert IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS


def test_a_model_without_experts_is_unchanged() -> None:
    with symbolic_experts(build("llama").model):
        assert IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS
