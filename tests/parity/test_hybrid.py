"""Recurrent states whose sums grow beyond what float32 holds."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from families import build
from parity.test_families import NEW_TOKENS, PROMPTS
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of, pieces_of

from tide_export.routers.random_routers import random_routers
from tide_export.verify.parity import check_full

LONG = [(i * 37) % 500 + 3 for i in range(100)]  # beyond a chunk of xLSTM


@pytest.mark.parametrize(
    ("family", "name", "change", "least"),
    [
        ("rwkv", "attention.key.weight", lambda weight: weight * 4, 100),  # exp(89) is infinite
        pytest.param(
            *("xlstm", "igate_preact.bias", lambda bias: bias + 40, 30), marks=pytest.mark.exhaustive
        ),  # softcapped at 15
    ],
)
def test_sums_of_large_exponentials(family: str, name: str, change, least: float, tmp_path: Path) -> None:
    """transformers keeps such sums relative to their largest term."""
    source, largest = build(family), []
    with torch.no_grad(), ExitStack() as hooks:
        for path, module in source.model.named_modules():
            if f"{path}.".endswith(f"{name.rpartition('.')[0]}."):
                parameter = module.get_parameter(name.rpartition(".")[2])
                parameter.copy_(change(parameter))
                hook = module.register_forward_hook(lambda *call: largest.append(float(call[-1].max())))
                hooks.callback(hook.remove)
        source.model(input_ids=torch.tensor([LONG]), use_cache=False)
    assert len(largest) == source.num_layers
    assert max(largest) > least
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS))
    full = check_full(engine, source, [LONG], NEW_TOKENS)
    assert full.holds, full.differences
    assert full.max_error < 1e-3
