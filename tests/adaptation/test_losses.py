"""The loss of early-exit training and what its steps are made of, on a tiny model."""

import pytest
import torch
from tiny_configs import small_llama
from transformers import LlamaForCausalLM

from tide_export.adaptation.config import AdaptConfig
from tide_export.adaptation.layer_dropout import dropped_layers, skip_rates
from tide_export.adaptation.losses import Batch, accumulate_gradients, exit_weights
from tide_export.adaptation.training import learning_rate
from tide_export.model.source import SourceModel, wrap_model

LAYERS = 4


def tiny() -> SourceModel:
    """A random Llama whose layers matter, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = small_llama(4096, 32, LAYERS, 64)
        config.initializer_range = 0.3
        return wrap_model(LlamaForCausalLM(config), "tiny")


def test_the_gradient_is_that_of_the_loss_as_a_whole() -> None:
    """In blocks and on padded sequences, as without both."""
    source, teacher = tiny(), tiny()
    source.model.requires_grad_(True)
    with torch.no_grad():
        for weight in source.model.parameters():
            weight.mul_(1.1)
    ids, settings = torch.randint(1, 4096, (2, 9)), AdaptConfig(original_weight=1.5, label_weight=0.5)
    lengths = torch.tensor([9, 6])
    chosen = exit_weights((1, 3), LAYERS, settings)

    def log_probabilities(one, row, layers):
        with one.structure.captured([layers]) as states:
            one.model(ids[row : row + 1, : lengths[row]])
        return one.model.lm_head(one.model.model.norm(states[layers]))[0].log_softmax(-1)

    loss = torch.zeros(())
    for row in range(2):
        with torch.no_grad():
            expected = log_probabilities(teacher, row, LAYERS)
        full = log_probabilities(source, row, LAYERS)
        following = ids[row, 1 : lengths[row]]
        loss = loss + 0.5 * torch.nn.functional.nll_loss(full[:-1], following, reduction="sum")
        loss = loss + 1.5 * torch.nn.functional.kl_div(full, expected, log_target=True, reduction="sum")
        for layers, weight in chosen.items():
            loss = loss - weight * (full.detach().exp() * log_probabilities(source, row, layers)).sum()
    (loss / 15).backward()
    wanted = [parameter.grad.clone() for parameter in source.model.parameters()]
    source.model.zero_grad()
    states, original = source.structure.captured([1, 3, LAYERS]), teacher.raw_hidden(ids, [LAYERS])[LAYERS]
    with states as raw:
        source.model(ids)
    accumulate_gradients(source, raw, (teacher, original), Batch(ids, lengths), chosen, settings, 15)
    for parameter, gradient in zip(source.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)


def test_dropped_layers_pass_their_sequences_unchanged() -> None:
    source = tiny()
    ids = torch.randint(1, 4096, (8, 5))
    with dropped_layers(source.structure, [0.0, 0.5, 0.0, 0.0], 8, torch.Generator().manual_seed(0)):
        states = source.raw_hidden(ids, [1, 2])
    same = [bool(torch.equal(a, b)) for a, b in zip(states[1], states[2], strict=True)]
    assert same == (torch.rand(8, generator=_after(0, 8)) < 0.5).tolist()
    assert 0 < sum(same) < 8
    assert skip_rates(5, 0.2)[0] == 0
    assert skip_rates(5, 0.2)[4] == pytest.approx(0.2)


def _after(seed: int, draws: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(draws, generator=generator)
    return generator


def test_weights_grow_with_depth_and_the_rate_warms_up_and_falls() -> None:
    found = exit_weights((4, 8, 12), 16, AdaptConfig(early_weight=2.0, depth_power=1.0))
    assert list(found.values()) == pytest.approx([2 * 4 / 24, 2 * 8 / 24, 2 * 12 / 24])
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates.index(max(rates)) in (4, 5)
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] < 0.06
