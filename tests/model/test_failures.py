"""Whatever a model's code raises ends in one sentence with the architecture, the module and the cause."""

from collections.abc import Callable

import pytest
import torch
from tiny_configs import SIZES
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.errors import TideError, TraceError, UnsupportedModelError
from tide_export.model.failures import refuse_trace
from tide_export.model.source import wrap_model
from tide_export.trace.tracer import trace

TINY = {**SIZES, "num_hidden_layers": 2}


def with_mlp(function: Callable[[torch.Tensor], torch.Tensor]) -> LlamaForCausalLM:
    """A Llama whose second layer computes `function` in place of its MLP."""

    class Odd(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return function(states)

    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.model.layers[1].mlp = Odd()
    return model


def fails(states: torch.Tensor) -> torch.Tensor:
    raise AttributeError("no such thing\nand more")


def fails_in_torch(states: torch.Tensor) -> torch.Tensor:
    return states @ states.new_zeros(3, 3)


def by_value(states: torch.Tensor) -> torch.Tensor:
    return states * 2 if states.sum() > 0 else states


def untranslated(states: torch.Tensor) -> torch.Tensor:
    return states + torch.special.bessel_j0(states)


@pytest.mark.parametrize(
    ("function", "cause"),
    [(fails, r"AttributeError \(no such thing\)"), (fails_in_torch, r"RuntimeError \(mat1 and mat2 .*\)")],
)
def test_a_model_that_does_not_run(function: Callable, cause: str) -> None:
    module = r"its Odd \(model.layers.1.mlp\)"
    sentence = rf"^LlamaForCausalLM cannot run on token ids alone, .*: {module} raises {cause}; export the .*"
    with pytest.raises(UnsupportedModelError, match=sentence):
        wrap_model(with_mlp(function), "odd")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (by_value, r"its Odd \(model.layers.1.mlp\) decides by the values of tensors what to compute$"),
        (untranslated, r"it computes with the operator \S*bessel_j0, which has no translation to ONNX$"),
    ],
)
def test_a_model_that_cannot_be_traced(function: Callable, sentence: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^LlamaForCausalLM cannot be exported: {sentence}"):
        trace(wrap_model(with_mlp(function), "odd"), (1,))


def test_what_only_the_trace_raises() -> None:
    calls = []

    def later(states: torch.Tensor) -> torch.Tensor:
        calls.append(states)
        if torch.compiler.is_exporting():
            raise KeyError("tables")
        return states

    source = wrap_model(with_mlp(later), "odd")
    with pytest.raises(
        TraceError, match=r"cannot trace LlamaForCausalLM, .* Odd \(model.layers.1.mlp\) raises KeyError"
    ):
        trace(source, (1,))


def test_a_sentence_of_the_package_stays_what_it_is() -> None:
    error = RuntimeError("torch has failed")
    error.__cause__ = UnsupportedModelError("it is odd")
    with pytest.raises(TideError, match=r"^it is odd$"):
        refuse_trace(nn.Identity(), error)
