"""Masks whose elements are known to be the same choose all rows or none; others remain."""

import numpy as np
import pytest
import tiers
import torch
from torch import nn

from tide_export.trace.exporter.decompositions import minimal_decompositions


class Adapters(nn.Module):
    """X-MOD's: one for each of three languages."""

    def __init__(self, language: int):
        super().__init__()
        self.language = language
        self.adapters = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def languages(self, states: torch.Tensor) -> torch.Tensor:
        return self.language * torch.ones(states.shape[0])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        languages, adapted = self.languages(states), torch.zeros_like(states)
        for number, adapter in enumerate(self.adapters):
            mask = languages == number
            rows = adapter(states[mask])
            adapted[mask] = rows
            if number == self.language:
                chosen = rows
        adapted += states  # a copy of the chosen rows
        return adapted + chosen.sum()


class Detecting(Adapters):
    """The language is that of the first number of each sequence."""

    def languages(self, states: torch.Tensor) -> torch.Tensor:
        return (states[:, 0, 0] > 0).float()


def exported(module: nn.Module) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Operators of the trace, and what it and the module compute."""
    torch.manual_seed(0)
    states = torch.randn(2, 3, 4)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with minimal_decompositions():
        program = torch.onnx.export(module.eval(), (states,), dynamo=True, opset_version=23, dynamic_shapes=(dynamic,))
    return [node.op_type for node in program.model.graph], program(states)[0].numpy(), module(states).detach().numpy()


@pytest.mark.parametrize("language", tiers.exhaustive_beyond(1, [1, 0, 2]))
def test_the_known_language_is_chosen_without_a_mask(language: int) -> None:
    operators, found, expected = exported(Adapters(language))
    assert operators.count("MatMul") + operators.count("Gemm") == 1
    assert "NonZero" not in operators
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_mask_of_the_states_remains() -> None:
    operators, found, expected = exported(Detecting(0))
    assert "NonZero" in operators
    np.testing.assert_allclose(found, expected, rtol=1e-5)
