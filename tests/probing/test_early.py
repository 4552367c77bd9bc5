"""The noise of draws, and the quick lens."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tide_export.probing.early import Early, _noise, _ridge

DRAWS = 40_000


def test_the_noise_draws_the_known_tokens_and_others_by_their_distribution():
    generator = torch.Generator().manual_seed(1)
    full, early = (torch.randn(12, generator=generator) * 1.5 for _ in range(2))
    p, q = full.softmax(0), early.softmax(0)
    drawn = torch.multinomial(p, DRAWS, replacement=True, generator=generator)
    noise = _noise(full.expand(DRAWS, -1), drawn, 0)
    assert torch.equal((full + noise).argmax(-1), drawn)
    other = (early + noise).argmax(-1)
    assert_close(torch.bincount(other, minlength=12) / DRAWS, q, atol=0.01, rtol=0)
    # Gumbel noise changes at least the total variation, and at most 2 TV / (1 + TV).
    distance, changed = float((p - q).abs().sum() / 2), float((other != drawn).float().mean())
    assert distance - 0.01 < changed < 2 * distance / (1 + distance) + 0.01


def test_equal_logits_draw_equal_tokens():
    logits = torch.tensor([[0.0, -200.0, 3.0, float("-inf")]]).expand(500, -1)
    drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    assert torch.equal((logits + _noise(logits, drawn, 3)).argmax(-1), drawn)


def test_the_quick_lens_finds_a_linear_map():
    generator = torch.Generator().manual_seed(0)
    states, others = (torch.randn(rows, 16, generator=generator) for rows in (4000, 50))
    matrix, offset = torch.randn(16, 16, generator=generator), torch.randn(16, generator=generator)
    expected = others + others @ matrix + offset
    found = _ridge(states, states + states @ matrix + offset, others)
    assert float((found - expected).norm() / expected.norm()) < 0.15  # ridge
    assert float((others - expected).norm() / expected.norm()) > 0.5


def test_a_replay_drafts_the_drawn_tokens_as_the_runtime_does():
    document, shape = np.repeat([0, 1], 5), (10, 2)
    early = np.arange(20).reshape(shape)
    found = Early((2, 4), 6, document, np.ones(shape, np.float32), early, np.zeros(10, np.int64), (0.0, 0.0))
    measured, chosen = found.recorded()
    assert chosen.tolist() == [0, 1]
    assert np.array_equal(measured.early, early.reshape(2, 5, 2))


def test_exits_of_the_final_state_change_nothing(of_early):
    _, early = of_early
    assert early.greedy_changed == pytest.approx((0.0,), abs=0.01)
    assert early.scores.min() > 0
    assert early.scores.max() <= 1 + 1e-6
    assert len(early.full) == len(early.document) == len(early.scores)
