"""Fused attention while states are collected: only where it gives the reference's states, and never afterwards."""

import pytest
import torch
from transformers import AttentionInterface, Gemma2Config, Gemma2ForCausalLM

from tide_export.calibration import fast_attention as attention
from tide_export.calibration.fast_attention import fast_attention
from tide_export.model.source import wrap_model

TEXT = list(range(3, 90))


def in_use(source):
    return source.model.config._attn_implementation


def test_fused_while_open_and_eager_afterwards(demo):
    ids = torch.tensor([TEXT])
    eager = demo.run(ids, (3, 12)).raw
    with fast_attention(demo, TEXT, (3, 12)) as name:
        assert name == in_use(demo) == "sdpa"
        fused = demo.run(ids, (3, 12)).raw
    assert in_use(demo) == "eager"
    for layers in (3, 12):
        assert torch.allclose(fused[layers], eager[layers], atol=1e-3)
        assert not torch.equal(fused[layers], eager[layers])


def test_eager_again_after_a_mistake(demo):
    with pytest.raises(KeyError), fast_attention(demo, TEXT, (3,)):
        raise KeyError
    assert in_use(demo) == "eager"


def test_attention_that_gives_other_states_is_not_used(demo, monkeypatch):
    """It sees every token but this one's own: nothing but a look at the states would tell."""

    def shifted(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1).roll(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return found.transpose(1, 2), None

    AttentionInterface.register("shifted", shifted)
    monkeypatch.setattr(attention, "FUSED", "shifted")
    with fast_attention(demo, TEXT, (3, 12)) as name:
        assert name == in_use(demo) == "eager"


def test_a_model_with_softcaps_keeps_its_attention():
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation="eager",
    )
    source = wrap_model(Gemma2ForCausalLM(config), "tiny")
    with fast_attention(source, [1, 2, 3], (1, 2)) as name:
        assert name == in_use(source) == "eager"
