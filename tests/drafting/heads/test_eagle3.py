"""EAGLE-3 heads in the layouts that are published: read, as networks, and drafting in bundles."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiers
import torch
from packed_models import (
    AWQ,
    FLOAT8,
    FP8,
    GPTQ,
    INT4,
    NVFP4,
    Quantizer,
    awq,
    compressed,
    compressed_words,
    fp8,
    fp8_rows,
    gptq,
    nvfp4,
)
from plain_graphs import Batch
from random_heads import (
    CONTEXT,
    EPSILON,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    Eagle3,
    drafts_cost_no_token,
    exported,
    network_equals_step,
    prompt,
    target,
)
from tiny_configs import LLAMA3
from torch.nn import functional

from tide_export.bundle.opened import open_bundle
from tide_export.drafting.heads.eagle3 import read_eagle3
from tide_export.model.source import SourceModel, load_model
from tide_export.names import batch_networks
from tide_export.names import step_graph as names
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.stepping import NO_LIMIT
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.quantized import restore
from tide_export.verify.step_graph import StepGraph

ROPE = LLAMA3["rope_parameters"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def source(model: Path) -> SourceModel:
    return load_model(str(model))


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def frequencies(scaled: bool) -> torch.Tensor:
    """Of the rotary angles; `scaled` as of Llama 3.1, from its paper's code."""
    plain = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    if not scaled:
        return plain
    turns = ROPE["original_max_position_embeddings"] * plain / (2 * torch.pi)
    low, high = ROPE["low_freq_factor"], ROPE["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / ROPE["factor"])


def published(head: Eagle3, x: torch.Tensor, s: torch.Tensor, scaled: bool, before: bool) -> tuple[torch.Tensor, ...]:
    """Logits by draft id [S, n] and next states [S, D], of embeddings and states of the positions 0 .. S - 1."""
    w = {key.removesuffix(".weight").removeprefix("midlayer."): value for key, value in head.weights.items()}
    normalized = rms(s, w["hidden_norm"])
    both = torch.cat([rms(x, w["input_layernorm"]), normalized], -1)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies(scaled))

    def heads(name: str, count: int) -> torch.Tensor:
        projected = both @ w[f"self_attn.{name}_proj"].T + w.get(f"self_attn.{name}_proj.bias", 0)
        return projected.view(len(x), count, HEAD_DIM).transpose(0, 1)

    def rotated(name: str, count: int) -> torch.Tensor:
        split = heads(name, count)
        if f"self_attn.{name}_norm" in w:
            split = rms(split, w[f"self_attn.{name}_norm"])
        a, b = split.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    q, k, v = rotated("q", HEADS), rotated("k", KV_HEADS), heads("v", KV_HEADS)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
    scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    z = (normalized if before else s) + attended @ w["self_attn.o_proj"].T + w.get("self_attn.o_proj.bias", 0)
    h = rms(z, w["post_attention_layernorm"])
    z = z + (functional.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms(z, w["norm"]) @ w["lm_head"].T, z


def make(layout: str, folder: Path) -> tuple[Eagle3, Path, bool, bool]:
    """A head and its folder, whether its rotary angles are scaled, and its residual normalized."""
    if layout == "eagle":
        head = Eagle3.random()
        return head, head.write(folder), False, False
    if layout == "bin, scaled rotary, biases":
        head = Eagle3.random(bias=True)
        head.config |= {"rope_scaling": {key: value for key, value in ROPE.items() if key != "rope_theta"}}
        return head, head.write_bin(folder), True, False
    if layout == "whole vocabulary, query norms":
        head = Eagle3.random(vocabulary=None, query_norms=True)
        return head, head.write(folder), False, False
    head = Eagle3.random()
    if layout in QUANTIZATIONS:
        settings, quantize = QUANTIZATIONS[layout]
        stored = head.quantized(settings, quantize)
        return head, head.write_speculators(folder, stored), False, True
    return head, head.write_speculators(folder), False, True


QUANTIZATIONS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "gptq": (GPTQ, gptq()),
    "awq": (AWQ, awq),
    "compressed-tensors, 4 bits": (compressed("pack-quantized", INT4), compressed_words()),
    "compressed-tensors, fp8": (compressed("float-quantized", FLOAT8), fp8_rows),
    "compressed-tensors, nvfp4": (compressed("nvfp4-pack-quantized", NVFP4), nvfp4),
    "fp8": (FP8, fp8),
}
LAYOUTS = ("eagle", "bin, scaled rotary, biases", "whole vocabulary, query norms", "speculators")


@pytest.mark.parametrize("layout", [*LAYOUTS, *QUANTIZATIONS])
def test_a_head_is_what_its_authors_publish(layout: str, source: SourceModel, tmp_path: Path) -> None:
    head, folder, scaled, before = make(layout, tmp_path / "head")
    read = read_eagle3(str(folder), source)
    generator = torch.Generator().manual_seed(7)
    x, s = torch.randn(2, 30, 64, generator=generator)
    expected, following = published(head, x, s, scaled, before)
    with torch.no_grad():
        logits, states = read.step(x[None], s[None], torch.arange(30)[None])
    order = head.tokens.argsort()
    assert read.tokens.tolist() == head.tokens[order].tolist()
    torch.testing.assert_close(logits[0], expected[:, order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[0], following, rtol=1e-4, atol=1e-4)
    assert read.layers == LAYERS
    assert torch.equal(read.fc, head.weights["fc.weight"])


def test_layers_are_counted_as_their_publishers_count(source: SourceModel, tmp_path: Path) -> None:
    nested, top = Eagle3.random(), Eagle3.random()
    nested.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}
    assert read_eagle3(str(nested.write(tmp_path / "nested")), source).layers == (1, 4, 7)
    folder = top.write_speculators(tmp_path / "top", eagle_aux_hidden_state_layer_ids=[1, 4, 6])
    assert read_eagle3(str(folder), source).layers == (1, 4, 6)


def test_the_model_s_embedding_may_come_with_it(source: SourceModel, tmp_path: Path) -> None:
    head = Eagle3.random()
    head.weights["embed_tokens.weight"] = source.model.get_input_embeddings().weight.detach().half()
    assert len(read_eagle3(str(head.write(tmp_path / "head")), source).tokens) == 40


@pytest.mark.parametrize("layout", tiers.exhaustive_but(LAYOUTS[1:3], LAYOUTS))
def test_the_network_is_the_head_with_rounded_weights(layout: str, source: SourceModel, tmp_path: Path) -> None:
    _, folder, _, _ = make(layout, tmp_path / "head")
    network_equals_step(read_eagle3(str(folder), source), tmp_path / "drafter.onnx")


# --- in a bundle -----------------------------------------------------------------------------------------------------


BUNDLES = {  # checkpoints of a model of five layers, the layers that its head reads after, and whether it norms states
    "one segment's layers": ((1, 4), (2, 3, 4), False),
    "a checkpoint between all layers": ((1, 2, 3, 4), (1, 4, 5), True),
}


def head_after(*layers: int, norm_before_fc: bool = False) -> Eagle3:
    head = Eagle3.random()
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    if norm_before_fc:
        head.config["norm_before_fc"] = True
        head.weights["input_norm.weight"] = 1 + 0.2 * torch.randn(192, generator=torch.Generator().manual_seed(2))
    return head


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("models") / "shallow", num_hidden_layers=5)


@pytest.fixture(scope="module", params=BUNDLES)
def bundle(request: pytest.FixtureRequest, shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A bundle, the layers that its head reads after, and the head."""
    checkpoints, layers, norm_before_fc = BUNDLES[request.param]
    folder, head = tmp_path_factory.mktemp("bundles"), head_after(*layers, norm_before_fc=norm_before_fc)
    return exported(shallow, head.write(folder / "head"), folder / "made", checkpoints), layers, head


@pytest.fixture(scope="module")
def engine(bundle: tuple[Any, ...]) -> Engine:
    return load(bundle[0], provider="cpu", threads=1)


def hidden_states(source: SourceModel, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """What the model has after each of `layers`, one beside the other, [S, 3 D]."""
    with torch.no_grad():
        raw = source.run(torch.tensor([ids]), layers).raw
    return torch.cat([raw[layer][0] for layer in layers], -1)


def fused(head: Eagle3, hidden: torch.Tensor) -> torch.Tensor:
    norm = head.weights.get("input_norm.weight")
    return (hidden if norm is None else rms(hidden, norm)) @ head.weights["fc.weight"].T


def test_draft_states_are_the_fused_hidden_states(bundle: tuple[Any, ...], engine: Engine, shallow: Path) -> None:
    """In a run over two sequences; `states` are those that the model's head reads nevertheless."""
    source, (path, layers, head) = load_model(str(shallow)), bundle
    texts = [prompt(VOCABULARY, 20), prompt(VOCABULARY, 7)[::-1]]
    outputs = Batch(open_bundle(path), 2).through(texts, range(len(engine.manifest.segment_sizes)))
    expected = fused(head, torch.cat([hidden_states(source, ids, layers) for ids in texts]))
    np.testing.assert_allclose(outputs[batch_networks.DRAFT_STATES][0], expected, rtol=1e-3, atol=1e-3)
    made = engine.generate(texts[0], mode="full", max_new_tokens=3, states=True, stop_token_ids=[])
    with torch.no_grad():
        depth = source.num_layers
        final = source.normalize(source.run(torch.tensor([texts[0] + made.tokens[:-1]]), (depth,)).raw[depth])[0]
    assert made.states is not None
    np.testing.assert_allclose(made.states, final, rtol=1e-3, atol=1e-3)


def test_states_of_earlier_steps_are_kept(bundle: tuple[Any, ...], shallow: Path) -> None:
    """Two tokens exit at different checkpoints, the third runs the last segment over all three."""
    source, (path, layers, head) = load_model(str(shallow)), bundle
    graph = StepGraph(open_bundle(path)).start([], NO_LIMIT)
    ids, checkpoints = prompt(VOCABULARY, 8), graph.graph.manifest.checkpoints
    never = [NEVER_EXIT] * len(checkpoints)
    late, early = [*never[1:], 0.0], [0.0, *never[1:]]
    final, exits = list[np.ndarray](), list[int]()
    for new, graph.thresholds in ((ids[:5], never), ([ids[5]], late), ([ids[6]], early), (ids[7:], never)):
        exits.append(graph.step(new).exit_layer)
        final.append(graph.outputs[names.FINAL_STATES])
    assert exits[1:3] == [checkpoints[-1], checkpoints[0]]
    expected = fused(head, hidden_states(source, ids, layers).reshape(8, -1))
    assert [states.shape[1] for states in final] == [5, 0, 0, 3]
    np.testing.assert_allclose(final[0][0], expected[:5], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(final[3][0], expected[5:], rtol=1e-3, atol=1e-3)


def test_the_manifest_says_what_it_drafts_with(bundle: tuple[Any, ...], engine: Engine) -> None:
    path, layers, _ = bundle
    drafter = engine.manifest.drafter
    assert drafter is not None
    assert (drafter.layers, drafter.token_count, drafter.max_tokens) == (layers, 40, CONTEXT)
    assert drafter.record == {"layout": "EAGLE-3", "head": str(path.parents[1] / "head")}


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_drafts_of_a_list_cost_no_token(engine: Engine, threshold: float) -> None:
    prompts = [prompt(VOCABULARY, 9, seed) for seed in range(3)]
    given: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": [0, 1, 2], "stop_token_ids": []}
    full = engine.generate(prompts, mode="full", **given)
    options = {"mode": "lossless", "threshold": threshold, "prompt_lookup": 0, "drafter": 4}
    drafted = engine.generate(prompts, **given, **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in full]
    assert sum(one.stats.learned_drafted for one in drafted) > 5  # none is accepted: what they may lose ends it


@pytest.mark.parametrize("threshold", [1.0, 0.5])
@pytest.mark.parametrize("drafter", [1, 4])
def test_drafts_cost_no_token(engine: Engine, drafter: int, threshold: float) -> None:
    """With a threshold below 1 exits draft too."""
    assert drafts_cost_no_token(engine, drafter=drafter, threshold=threshold) > 20


@pytest.mark.parametrize("bundle", tiers.exhaustive_but(["a checkpoint between all layers"], BUNDLES), indirect=True)
def test_other_modes_are_what_they_are_without_it(
    bundle: tuple[Any, ...], engine: Engine, shallow: Path, tmp_path: Path
) -> None:
    checkpoints = engine.manifest.checkpoints
    plain = load(exported(shallow, None, tmp_path / "plain", checkpoints), provider="cpu", threads=1)
    ids = [prompt(VOCABULARY, length, length) for length in (5, 12, 20)]
    for mode in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5}, {"mode": "lossless", "threshold": 0.5}):
        given = {"max_new_tokens": 20, "stop_token_ids": [], "min_layers": 1} | mode
        if mode["mode"] != "exit":
            del given["min_layers"]
        for one, other in zip(engine.generate(ids, **given), plain.generate(ids, **given), strict=True):
            assert one.tokens == other.tokens
        if mode["mode"] != "lossless":
            one, other = engine.generate(ids[0], **given), plain.generate(ids[0], **given)
            assert (one.tokens, one.stats.exit_layer) == (other.tokens, other.stats.exit_layer)


STORED = {"int4": {"blocks": 64 * 192 // 2, "scales": 64 * 192 // 32 * 4}, "bf16": {"bf16": 64 * 192 * 2}}  # bytes


@pytest.mark.parametrize("weights", tiers.exhaustive_beyond(1, STORED))
def test_the_fused_matrix_has_the_bundle_s_precision(weights: str, tmp_path: Path) -> None:
    model = target(tmp_path / "target", num_hidden_layers=3)
    head = head_after(1, 2, 3, norm_before_fc=True).write(tmp_path / "head")
    bundle = exported(model, head, tmp_path / "made", (2,), weights=weights)
    assert drafts_cost_no_token(load(bundle, provider="cpu", threads=1)) > 20
    tensors = {value.name: value.const_value for value in ir.load(bundle / "model.onnx").graph.initializers.values()}
    fused = {name: tensor.nbytes for name, tensor in tensors.items() if name.startswith(names.DRAFT_HEAD_FUSION)}
    expected = STORED[weights] | {"norm": 192 * 4}
    assert fused == {f"{names.DRAFT_HEAD_FUSION}.{part}": size for part, size in expected.items()}
    error = restore(load_model(str(model)), open_bundle(bundle))  # as `validate` does: the head's matrix is no model's
    assert weights == "bf16" or (error is not None and 0 < error < 0.2)
