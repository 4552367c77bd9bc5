"""Muon makes PyTorch's changes, in the type of numbers that it is given."""

from typing import Any

import pytest
import torch

from tide_export.drafting import muon
from tide_export.drafting.muon import Muon

SHAPES = [(24, 40), (40, 24), (16, 16)]


def changed(
    optimizer: type[torch.optim.Optimizer], steps: int = 4, saved: int | None = None, **options: Any
) -> list[torch.Tensor]:
    """Random weights after `steps` random gradients; another optimizer takes over the state after `saved` of them."""
    random = torch.Generator().manual_seed(5)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]
    settings = {"lr": 0.02, "weight_decay": 0.1, "ns_steps": 3} | options
    one = optimizer(weights, **settings)
    for step in range(steps):
        if step == saved:
            state = one.state_dict()
            one = optimizer(weights, **settings)
            one.load_state_dict(state)
        for weight in weights[: len(weights) if step else 2]:  # the last has no gradient at first
            weight.grad = torch.randn(weight.shape, generator=random)
        one.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_the_changes_are_pytorchs(dtype: torch.dtype, adjust: str) -> None:
    expected = changed(torch.optim.Muon, adjust_lr_fn=adjust)
    for saved in (None, 2):
        for ours, theirs in zip(changed(Muon, saved=saved, dtype=dtype, adjust_lr_fn=adjust), expected, strict=True):
            if dtype is torch.bfloat16:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-3)
                assert not torch.equal(ours, theirs)


def test_singular_values_come_near_one_in_float32() -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    found = muon.orthogonal(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert found.dtype is torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert torch.equal(muon.orthogonal(matrix.T, (3.4445, -4.775, 2.0315), 5, 1e-7), found.T)
