"""The features of each family's row matter to the prompts of the parity test.

For each feature one family is taken, the feature is switched off in the *HuggingFace* model, and its logits must move
by far more than parity tolerates: an export that lost the feature could not pass. What depends on the length of the
sequence beyond what an export can hold is refused with a sentence.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from hybrid_families import HYBRID
from parity.test_families import PROMPTS
from tiny_configs import CONTEXT, WINDOW
from transformers import masking_utils

from tide_export.errors import ConfigError, UnsupportedModelError
from tide_export.model.source import SourceModel, auto_class, wrap_model
from tide_export.pipeline.preflight import context_length
from tide_export.trace.attention.masks import Mask, classify, layer_masks
from tide_export.verify.parity import TOLERANCES

IDS = torch.tensor([PROMPTS[2]])


def set_config(**values: Any) -> Callable[[SourceModel], None]:
    def change(source: SourceModel) -> None:
        for key, value in values.items():
            assert getattr(source.text_config, key) != value, f"{key} is already off"
            setattr(source.text_config, key, value)

    return change


def set_rope(**values: Any) -> Callable[[SourceModel], None]:
    def change(source: SourceModel) -> None:
        source.text_config.rope_parameters = {**source.text_config.rope_parameters, **values}

    return change


def set_weights(part: str, value: float) -> Callable[[SourceModel], None]:
    def change(source: SourceModel) -> None:
        parameters = [p for name, p in source.model.named_parameters() if part in name]
        assert parameters, part
        for parameter in parameters:
            parameter.data.fill_(value)

    return change


# Feature -> a family that has it and how to turn it off.
OFF: dict[str, tuple[str, Callable[[SourceModel], None]]] = {
    "sliding window": ("mistral", set_config(sliding_window=CONTEXT)),
    "per-layer types": ("gemma2", set_config(layer_types=["full_attention", "sliding_attention", "full_attention"])),
    "softcaps": ("gemma2", set_config(attn_logit_softcapping=100.0)),
    "softcap of the logits": ("gemma2", set_config(final_logit_softcapping=100.0)),
    "attention sinks": ("gpt_oss", set_weights("sinks", -1e4)),
    "partial rotary": ("phi", set_rope(partial_rotary_factor=1.0)),
    "llama3 rotary scaling": ("llama (3.1)", set_rope(rope_type="default")),
    "yarn rotary scaling": ("qwen3", set_rope(rope_type="default")),
    "longrope rotary scaling": ("phi3", set_rope(rope_type="default")),
    "linear rotary scaling": ("llama (linear)", set_rope(rope_type="default")),
    "q/k norms": ("qwen3", set_weights("k_norm", 1.0)),
    "biases": ("llama (3.1)", set_weights("q_proj.bias", 0.0)),
    "biased head": ("phi", set_weights("lm_head.bias", 0.0)),
    "logit scaling": ("granite", set_config(logits_scaling=1.0)),
    "embedding scale": ("granite", set_config(embedding_multiplier=1.0)),
    "experts": ("mixtral", set_config(num_experts_per_tok=1)),
    "shared experts": ("deepseek_v3", set_weights("shared_experts.down_proj", 0.0)),
    "layers without rotary": ("smollm3", set_config(no_rope_layers=[1, 1, 1])),
    "query scaling by position": ("llama4 (text)", set_config(attn_scale=0.0)),
    "learned positions": ("gpt2", set_weights("wpe", 0.0)),
    "project_in and project_out": ("opt (350m)", set_weights("project_out", 0.0)),
    "ALiBi": ("falcon (ALiBi)", set_config(alibi=False)),
    "per-layer embeddings": ("gemma4 (text)", set_weights("per_layer_projection.weight", 0.0)),
    "biases by distance": ("inkling (text)", set_weights("rel_logits_proj.proj", 0.0)),
    "norms after": ("olmo2", set_weights("post_attention_layernorm", 1.0)),
    "layers that run several times": ("hrm_text", set_config(L_cycles=1, num_hidden_layers=4)),
    "scores by token": ("doge", set_weights("self_attn.A", 0.0)),
}
# Without these the model would have other parameters, so their presence shows.
IN_THE_SHAPES = {
    "grouped queries",
    "heads of 24",
    "tied embeddings",
    "latent attention",
    "differential attention",
    "packed projections",
    "parallel residual",
    "interleaved rotary",
    "no final norm",
    "K/V shared by layers",
    "several hidden states of a token",
    "text model inside ForConditionalGeneration",
    "mixture of attention heads",
    "several attentions in a layer",
    "gated attention",
    "heads by layer",
    *(feature for row in HYBRID.values() for feature in row.features if feature not in OFF),
}
ELSEWHERE = {"dynamic rotary scaling", "attention in blocks", "indexed attention"}  # in the tests on lengths below


@pytest.mark.parametrize("feature", OFF)
def test_a_lost_feature_would_show(feature: str) -> None:
    family, switch_off = OFF[feature]
    source = build(family)
    with torch.no_grad():
        right = source.model(IDS).logits
        switch_off(source)
        rebuilt = auto_class(source.model.config).from_config(source.model.config, attn_implementation="eager")
        rebuilt.load_state_dict(source.model.state_dict())
        wrong = wrap_model(rebuilt, family).model(IDS).logits
    assert (wrong - right).abs().max() > 10 * TOLERANCES["fp32"].relative_error * right.abs().max()


def test_every_feature_of_the_list_is_shown_to_matter() -> None:
    named = {feature for family in FAMILIES.values() for feature in family.features}
    assert named <= OFF.keys() | IN_THE_SHAPES | ELSEWHERE


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", [Mask("window", WINDOW), Mask("causal"), Mask("window", WINDOW)]),
        ("qwen2", [Mask("causal"), Mask("window", WINDOW), Mask("window", WINDOW)]),
        ("llama4 (text)", [Mask("chunk", 192), Mask("causal"), Mask("chunk", 192)]),
    ],
)
def test_masks_are_read_from_the_model(family: str, expected: list[Mask]) -> None:
    source = build(family)
    assert list(layer_masks(source.model, source.structure.layers)) == expected
    assert source.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("size", [1, 7, 128, 4096])
def test_a_mask_is_known_by_its_rule(size: int) -> None:
    rule = masking_utils.sliding_window_causal_mask_function(size)
    assert classify(rule, size, 131072) == Mask("window", size)
    assert classify(rule, size + 1, 131072) is None  # a config that differs from the mask
    assert classify(rule, None, 131072) is None
    assert classify(masking_utils.causal_mask_function, size, 131072) == Mask("causal")
    assert classify(lambda b, h, q, k: k <= q + 1, size, 131072) is None


def test_a_mask_is_joined_with_no_other_than_an_indexers_choice() -> None:
    assert Mask("causal") & torch.zeros(1, dtype=torch.int32) == Mask("causal")
    with pytest.raises(TypeError, match="not joined with another mask"):
        Mask("causal") & torch.ones(1, 1, 3, 3, dtype=torch.bool)


def test_a_mask_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = build("llama")
    monkeypatch.setattr(masking_utils, "causal_mask_function", masking_utils.bidirectional_mask_function)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM masks attention in a way"):
        layer_masks(source.model, source.structure.layers)


def test_masks_of_a_layers_attentions_that_differ_are_refused() -> None:
    source = build("longcat_flash")
    assert list(layer_masks(source.model, source.structure.layers)) == [Mask("causal")] * source.num_layers
    second = source.structure.layers[1].self_attn[1]
    attend = second.forward
    second.forward = lambda *args, **kwargs: attend(*args, **{**kwargs, "attention_mask": Mask("window", WINDOW)})
    with pytest.raises(UnsupportedModelError, match=r"LongcatFlashForCausalLM attends with several masks in layer 1"):
        layer_masks(source.model, source.structure.layers)


@pytest.mark.parametrize(
    ("family", "longest", "why"),
    [
        ("phi3", CONTEXT // 2, "longrope"),
        ("phimoe", CONTEXT // 2, "longrope"),
        ("llama4 (text)", 192, "blocks"),
        ("deepseek_v32", 192, "chosen tokens"),
        ("minimax_m3 (text)", 192, "chosen tokens"),
        ("doge", 192, "chosen tokens"),
        ("qwen4_exp (text)", 128, "chosen tokens"),
        ("llama (dynamic)", CONTEXT, "context"),
    ],
)
def test_lengths_an_export_is_not_exact_for_are_refused(
    family: str, longest: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = build(family)
    with caplog.at_level(logging.WARNING):
        assert context_length(source, None) == longest
    assert (why in caplog.text) == (longest < CONTEXT)
    assert context_length(source, longest - 1) == longest - 1
    with pytest.raises(ConfigError, match=why):
        context_length(source, longest + 1)


@pytest.mark.parametrize("family", ["phi3", "phimoe", "llama (dynamic)"])
def test_beyond_that_length_the_source_model_changes_its_logits_of_earlier_tokens(family: str) -> None:
    """Otherwise the limit would be too strict."""
    source = build(family)
    limit = context_length(source, None)
    ids = torch.arange(limit + 1)[None] % 500
    with torch.no_grad():
        within, beyond = source.model(ids[:, :limit]).logits, source.model(ids).logits[:, :limit]
        again = source.model(ids[:, : limit - 1]).logits
    assert (within[:, : limit - 1] - again).abs().max() < 1e-4
    assert (within - beyond).abs().max() > 1e-2


def test_tied_embeddings_are_one_tensor() -> None:
    model = build("llama (3.1)").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_latent_attention_has_keys_wider_than_values() -> None:
    config = build("deepseek_v3").text_config
    shape = SimpleNamespace(key=config.qk_nope_head_dim + config.qk_rope_head_dim, value=config.v_head_dim)
    assert shape.key > shape.value
    assert shape.key % 8  # neither is a width the kernel takes as it is
