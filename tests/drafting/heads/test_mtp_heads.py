"""MTP layers of a model's own files: read, as a network, and drafting in a bundle."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiers
import torch
import transformers as tf
from random_heads import drafts_cost_no_token, exported, network_equals_step
from safetensors.torch import load_file, save_file
from tiny_configs import CONTEXT, HEADS, LATENT, LAYERS, SIZES, TWO_SLIDING, WINDOW, YARN, rope
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tide_export.drafting.heads.mtp import read_mtp
from tide_export.errors import DraftError
from tide_export.model.source import SourceModel, load_model
from tide_export.runtime.engine import load

Names = Callable[[str], str]
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def after_last_layer(name: str) -> str:
    """The name in files of DeepSeek's layout, where the layer follows the model's."""
    name = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{LAYERS}.{name}"


def beside_model(name: str) -> str:
    """The name in files of Mellum's layout."""
    outside = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    first, *rest = name.removeprefix("layers.0.").split(".")
    return ".".join(["mtp", outside[first], *rest] if first in outside else ["mtp.layers.0", *rest])


@dataclass(frozen=True)
class Family:
    config: Callable[[], tf.PretrainedConfig]
    kind: type[tf.PreTrainedModel]
    name: Names
    keys: str  # of these weights, as a release of this depth would have them in transformers


FAMILIES = {
    "deepseek_v3": Family(
        lambda: tf.DeepseekV3Config(
            **SIZES,
            **EXPERTS,
            **LATENT,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            num_mtp_layers=1,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        ),
        tf.DeepseekV3ForCausalLM,
        after_last_layer,
        rf"model\.layers\.{LAYERS}.*",
    ),
    "glm4_moe": Family(
        lambda: tf.Glm4MoeConfig(
            **HEADS,
            **EXPERTS,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
            num_mtp_layers=1,
            rope_parameters={**YARN["rope_parameters"], "partial_rotary_factor": 0.5},
        ),
        tf.Glm4MoeForCausalLM,
        after_last_layer,
        rf"model\.layers\.{LAYERS}.*",
    ),
    "glm4_moe_lite": Family(
        lambda: tf.Glm4MoeLiteConfig(
            **SIZES,
            **EXPERTS,
            **LATENT,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=1,
            num_mtp_layers=1,
            mtp_mlp_layer_types=["sparse"],
        ),
        tf.Glm4MoeLiteForCausalLM,
        after_last_layer,
        rf"model\.layers\.{LAYERS}.*",
    ),
    "exaone_moe": Family(  # as K-EXAONE's config says: a window, and no experts
        lambda: tf.ExaoneMoeConfig(
            **HEADS,
            **EXPERTS,
            num_experts=8,
            layer_types=TWO_SLIDING,
            sliding_window=WINDOW,
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_mtp_layers=1,
            mtp_layer_types=["sliding_attention"],
            mtp_mlp_layer_types=["dense"],
        ),
        tf.ExaoneMoeForCausalLM,
        beside_model,
        r"^mtp\.",
    ),
    "mellum": Family(
        lambda: tf.MellumConfig(
            **HEADS,
            **EXPERTS,
            num_experts=8,
            layer_types=TWO_SLIDING,
            sliding_window=WINDOW,
            num_mtp_layers=1,
        ),
        tf.MellumForCausalLM,
        beside_model,
        r"^mtp\.",
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(autouse=True)
def _shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows an MTP layer by the depth of the models that were released."""
    for family in FAMILIES.values():
        monkeypatch.setattr(family.kind, "_keys_to_ignore_on_load_unexpected", [family.keys])


def written(name: str, folder: Path) -> Path:
    """A model with random weights and an MTP layer in its files, whose experts are matrices of their own there."""
    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = family.kind(family.config()).eval()
        layer = MtpModel(model, 1)
        for parameter in (*model.parameters(), *layer.parameters()):
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for key, value in layer.state_dict().items():
        if not key.startswith("layers.0."):
            continue
        if not key.endswith(("gate_up_proj", "down_proj")):
            weights[family.name(key)] = value.clone()
            continue
        for expert, matrix in enumerate(value):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, rows in (parts if key.endswith("gate_up_proj") else {"down_proj": matrix}).items():
                weights[family.name(f"{key.rpartition('.')[0]}.{expert}.{part}.weight")] = rows.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def drafted(source: SourceModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the first draft by transformers' own code."""
    model = MtpModel.from_pretrained(source.model)
    count = ids.shape[1] - 1
    with torch.no_grad():
        states = source.model(ids[:, :count], output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=source.model.config.get_mtp_config())
        cache.activate_past_recording()
        positions = torch.arange(1, count + 1)[None]
        _, logits, _ = model(ids[:, 1:], states, torch.ones_like(ids[:, 1:]), positions, cache)
    return logits[0, 0]


def test_a_head_is_what_transformers_runs(model: Path) -> None:
    source = load_model(str(model))
    head = read_mtp(source)
    ids = torch.randint(3, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        raw = source.run(ids[:, :-1], [LAYERS]).raw[LAYERS]
        embeddings = source.model.get_input_embeddings()(ids[:, 1:])
        logits, states = head.step(embeddings, source.normalize(raw), torch.arange(23)[None])
    torch.testing.assert_close(logits[0, -1], drafted(source, ids), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(source.model.lm_head(states), logits)
    assert head.tokens.tolist() == list(range(512))
    assert (head.layers, head.fc) == ((), None)


@pytest.mark.parametrize("model", tiers.exhaustive_but(["deepseek_v3", "mellum"], FAMILIES), indirect=True)
def test_the_network_is_the_head_with_rounded_weights(model: Path, tmp_path: Path) -> None:
    network_equals_step(read_mtp(load_model(str(model))), tmp_path / "drafter.onnx")


@pytest.mark.parametrize("model", tiers.exhaustive_but(["mellum"], FAMILIES), indirect=True)
def test_drafts_cost_no_token(model: Path, tmp_path: Path) -> None:
    engine = load(exported(model, model, tmp_path / "made", (1, 2)), provider="cpu", threads=1)
    drafter = engine.manifest.drafter
    assert drafter is not None
    assert (drafter.layers, drafter.token_count, drafter.max_tokens) == ((), 512, CONTEXT)
    assert drafter.record == {"layout": "MTP", "head": str(model)}
    assert drafts_cost_no_token(engine, drafter=3) > 20


def test_models_without_an_mtp_layer_are_refused(tmp_path: Path) -> None:
    folder = written("mellum", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not key.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DraftError, match="has no MTP layer of a layout that is known: give the folder of an EAGLE-3"):
        read_mtp(load_model(str(folder)))
