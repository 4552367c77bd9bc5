"""Models with recurrent states against the oracle: `full` equals Hugging Face, `exit` TIDE's rule, drafts are taken
back from the states, and sequences of a batch keep theirs apart."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from families import build
from hybrid_families import HYBRID
from parity.test_families import LENS_AND_SHORTLIST, NEW_TOKENS, PROMPTS, check_batch
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of, pieces_of

from tide_export.routers.random_routers import random_routers
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full, check_lossless

LONG = [(i * 37) % 500 + 3 for i in range(100)]  # beyond a chunk of xLSTM
ENDED = [9, 2, 7, 5, 2, 2, 11, 40]  # texts end within: n-grams do not go back beyond an end


@pytest.mark.parametrize("family", [name for name, family in HYBRID.items() if not family.costly])
def test_a_model_with_states_is_equal_in_every_mode(family: str, tmp_path: Path) -> None:
    source = build(family)
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, **LENS_AND_SHORTLIST)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS), batch=True)
    prompts = [*PROMPTS, ENDED] if "embeddings of n-grams" in HYBRID[family].features else PROMPTS
    full = check_full(engine, source, prompts, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    assert full.max_error < 1e-3

    exits: set[int] = set()
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    for thresholds, max_pending in (([0.3] * 2, 1), ([0.7] * 2, 4), (middle, 16), (middle, 1)):
        check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, max_pending)
        assert check.holds, (thresholds, max_pending, check.differences)
        exits |= set(check.exits)
    assert len(exits) > 1, "tokens must wait at a checkpoint, and others pass it"

    drafts = check_lossless(engine, source, PROMPTS, NEW_TOKENS, threshold=0.0, max_pending=3)
    assert drafts.holds, drafts.differences
    assert drafts.drafted > drafts.accepted, "no draft was rejected, so nothing was taken back from a state"
    check_batch(family, engine, middle)


@pytest.mark.parametrize(
    ("family", "name", "change", "least"),
    [
        ("rwkv", "attention.key.weight", lambda weight: weight * 4, 100),  # exp(89) is infinite
        ("xlstm", "igate_preact.bias", lambda bias: bias + 40, 30),  # softcapped at 15
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
