"""A loop over the experts that tokens chose is traced as products of every row with its expert."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional

from tide_export.errors import TraceError
from tide_export.graph.rewriting import nodes_of
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL
from tide_export.trace.expert_loops import single_iterations
from tide_export.trace.tracer import export_graph

EXPERTS, WIDTH, CHOSEN = 5, 8, 2
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MULTIPLIES: dict[str, Multiply] = {
    "linear": functional.linear,
    "operator": lambda x, w: x @ w,
    "function": torch.matmul,
    "transposed": lambda x, w: x.matmul(w.T),
}


class Looping(nn.Module):
    """Experts of one matrix and a bias; that of the last number has no weights and is left out."""

    def __init__(self, multiply: Multiply, inner: int = WIDTH, order: tuple[int, ...] = (2, 1, 0)):
        super().__init__()
        self.multiply, self.order = multiply, order
        self.stacked = nn.Parameter(torch.randn(EXPERTS * inner, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        weights = self.stacked.view(EXPERTS, -1, WIDTH)
        mask = functional.one_hot(top_k_index, num_classes=EXPERTS + 1).permute(*self.order)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = expert[0]
            if expert == EXPERTS:
                continue
            slot, token = torch.where(mask[expert])
            states = self.multiply(hidden_states[token], weights[expert])[:, :WIDTH] + self.bias[expert]
            result.index_add_(0, token, states * top_k_weights[token, slot, None])
        return result


class SomeIdle(nn.Module):
    """Experts of which the last compute nothing; only the others have matrices."""

    def __init__(self, busy: int = 3):
        super().__init__()
        self.busy, self.matrices = busy, nn.Parameter(torch.randn(busy, WIDTH, WIDTH))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, num_classes=EXPERTS).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False):
            expert = int(number.item())
            slot, token = torch.where(mask[expert].squeeze(0))
            if token.numel() == 0:
                continue
            states = hidden_states[token]
            states = states * 2 if expert >= self.busy else functional.linear(states, self.matrices[expert])
            result.index_add_(0, token, states * top_k_weights[token, slot, None])
        return result


class Routed(nn.Module):
    """Chooses by the hidden states' own values."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, 1)
        weights, index = tokens[:, :EXPERTS].softmax(-1).topk(CHOSEN)
        return self.experts(tokens, index, weights).view_as(hidden_states)


def traced(experts: nn.Module) -> tuple[Routed, torch.Tensor, ir.Model]:
    """The module, a sample of its input, and its trace as the tracer makes it."""
    torch.manual_seed(0)
    module, sample = Routed(experts), torch.randn(2, 3, WIDTH)
    with single_iterations(module):
        return module, sample, export_graph(module, {"hidden_states": sample}, ["result"], module, "a test")


@pytest.mark.parametrize("multiply", MULTIPLIES)
def test_it_computes_what_the_loop_does(multiply: str) -> None:
    module, sample, model = traced(Looping(MULTIPLIES[multiply]))
    assert len(nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)) == 1
    assert "forward" not in vars(module.experts)
    check_equal(module, sample, model)


@pytest.mark.parametrize("busy", [1, 3])
def test_experts_that_compute_nothing_are_left_out_of_the_products(busy: int) -> None:
    module, sample, model = traced(SomeIdle(busy))
    (product,) = nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)
    assert product.attributes["num_experts"].as_int() == busy
    check_equal(module, sample, model)


def check_equal(module: Routed, sample: torch.Tensor, model: ir.Model) -> None:
    ExpertMatMulPass()(model)
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    for states in (sample, torch.randn(3, 5, WIDTH)):
        (found,) = session.run(None, {"hidden_states": states.numpy()})
        np.testing.assert_allclose(found, module(states).detach(), rtol=1e-5, atol=1e-5)


def test_large_weights_are_stored_by_expert_and_not_copied() -> None:
    experts = Looping(functional.linear, inner=2**14)
    _, _, model = traced(experts)
    (product,) = nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)
    stored = product.inputs[2].const_value.numpy()
    assert stored.shape == (EXPERTS, 2**14, WIDTH)
    assert np.shares_memory(stored, experts.stacked.detach().numpy())


def test_another_order_of_the_mask_is_refused() -> None:
    with pytest.raises(TraceError, match="whose mask has its axes in the order"):
        traced(Looping(functional.linear, order=(2, 0, 1)))
