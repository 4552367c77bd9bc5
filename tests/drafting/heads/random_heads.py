"""Targets with random weights, and draft heads for them in the layouts that are published."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from ort_sessions import session_options
from packed_models import QUANTIZED, Quantizer
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.compose.drafter_networks import EMBEDDINGS, DrafterPieces, compose_drafter
from tide_export.drafting.files import QUANTIZATION, quantized
from tide_export.drafting.heads.head import DraftHead
from tide_export.drafting.heads.pieces import head_pieces, matrices_of
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.model.source import load_model
from tide_export.names import paged, paged_drafter
from tide_export.pipeline.flow import export
from tide_export.quantize.matrices import Change
from tide_export.routers.drafter_weights import CONFIDENCES
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 16, 96
VOCABULARY, DEPTH, CONTEXT = 97, 7, 96
EPSILON = 1e-5
LAYERS = (2, 3, 4)  # 2, N // 2, N - 3


def target(folder: Path, **changes: Any) -> Path:
    """Writes a Llama with random weights, whose tokens are not all alike."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = LlamaConfig(**sizes | changes)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Eagle3:
    """The files of a head with random weights; `weights` have the names of EAGLE's layout."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor = field(default_factory=lambda: torch.arange(VOCABULARY))  # by draft id

    @classmethod
    def random(cls, vocabulary: int | None = 40, query_norms: bool = False, bias: bool = False) -> "Eagle3":
        generator = torch.Generator().manual_seed(11)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        sizes = {
            "fc": (WIDTH, 3 * WIDTH),
            "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "midlayer.mlp.gate_proj": (MLP, WIDTH),
            "midlayer.mlp.up_proj": (MLP, WIDTH),
            "midlayer.mlp.down_proj": (WIDTH, MLP),
            "lm_head": (vocabulary or VOCABULARY, WIDTH),
        }
        weights = {f"{name}.weight": 1.5 * normal(*size) * size[1] ** -0.5 for name, size in sizes.items()}
        norms = ["norm", *(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))]
        weights |= {f"{name}.weight": 1 + 0.2 * normal(WIDTH) for name in norms}
        if query_norms:
            weights |= {f"midlayer.self_attn.{n}_norm.weight": 1 + 0.2 * normal(HEAD_DIM) for n in "qk"}
        if bias:
            weights |= {
                f"midlayer.self_attn.{n}_proj.bias": 0.2 * normal(len(weights[f"midlayer.self_attn.{n}_proj.weight"]))
                for n in "qkvo"
            }
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
        }
        if bias:
            config["attention_bias"] = True
        head = cls(config, weights)
        if vocabulary is not None:
            head.tokens = torch.randperm(VOCABULARY, generator=generator)[:vocabulary]
            config["draft_vocab_size"] = vocabulary
            weights["d2t"] = head.tokens - torch.arange(vocabulary)
            weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, head.tokens, True)
        return head

    def write(self, folder: Path) -> Path:
        """In the layout of EAGLE, SpecForge, AngelSlim and NVIDIA."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")
        return folder

    def write_bin(self, folder: Path) -> Path:
        """The same with pytorch_model.bin, as the first heads of EAGLE's authors."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        torch.save(self.weights, folder / "pytorch_model.bin")
        return folder

    def quantized(self, settings: dict[str, Any], quantize: Quantizer) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint whose projections are quantized; `weights` become what they stand for."""
        self.config["quantization_config"] = settings
        stored = dict(self.weights)
        for name in filter(QUANTIZED.search, self.weights):
            if name == "lm_head.weight":  # as `ignore` of their settings says
                continue
            parts, meant = quantize(stored.pop(name).T.numpy())
            stored |= {name.removesuffix("weight") + part: as_tensor(array) for part, array in parts.items()}
            self.weights[name] = as_tensor(meant.T)
        return stored

    def write_speculators(self, folder: Path, stored: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
        """In the layout of the package `speculators`; `stored`: the tensors, if they are not `weights`."""
        folder.mkdir()
        top = {"draft_vocab_size", "architectures", "quantization_config"}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.config.get("draft_vocab_size"),
            "norm_before_residual": True,
            "quantization_config": self.config.get("quantization_config"),
            "transformer_layer_config": {key: value for key, value in self.config.items() if key not in top},
        }
        (folder / "config.json").write_text(json.dumps(config | changes))
        tensors = self.weights if stored is None else stored
        named = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
        save_file(named, folder / "model.safetensors")
        return folder


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor of its own, as files need it."""
    return array.contiguous() if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))


def rounded(head: DraftHead, context: int = CONTEXT) -> tuple[DrafterPieces, QuantizedWeights]:
    """The head's pieces and their quantized matrices, which take the place of the head's own."""
    pieces = head_pieces(head, context)
    weights = quantized(pieces, replace(QUANTIZATION, accuracy_level=1))  # inputs stay float32
    for matrix in matrices_of(head.model):
        if matrix.name in weights.blocks:
            matrix.write(weights.blocks[matrix.name].values(), Change())
    return pieces, weights


def network_equals_step(head: DraftHead, file: Path, rows: int = CONTEXT - 4, drafts: int = 4) -> None:
    """Asserts that the head's network, with K/V in pages, is the head with rounded weights: for the rows of a prompt in
    two runs, and for drafts that are made of its own states."""
    pieces, weights = rounded(head)
    ir.save(lower_for_onnxruntime(compose_drafter(pieces), weights), file)
    session = onnxruntime.InferenceSession(str(file), session_options(), providers=["CPUExecutionProvider"])
    kv_heads, head_dim = pieces.kv_shape
    pages = {kind: np.zeros((CONTEXT // 16, kv_heads, 16, head_dim), np.float32) for kind in ("key", "value")}
    generator, width = torch.Generator().manual_seed(3), pieces.hidden_size
    embeddings = torch.randn(1, rows + drafts, width, generator=generator)
    states = 2 * torch.randn(1, rows, width, generator=generator)

    def run(start: int, states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        stop = start + states.shape[1]
        feeds = {
            EMBEDDINGS: embeddings[:, start:stop].numpy(),
            paged_drafter.HIDDEN_STATES: states.numpy(),
            paged_drafter.POSITION_IDS: np.arange(start, stop)[None],
            paged_drafter.LAST_TOKENS: np.array([states.shape[1] - 1]),
            paged_drafter.SEQUENCE_STARTS: np.array([0, states.shape[1]]),
            paged_drafter.SEQUENCE_LENGTHS: np.array([stop]),
            paged_drafter.PAGE_TABLE: np.arange(CONTEXT // 16, dtype=np.int32)[::-1][None],
            **{paged.pages(0, kind): value for kind, value in pages.items()},
        }
        outputs = [paged_drafter.LOGITS, paged_drafter.NEW_HIDDEN_STATES, *(paged.new_pages(0, kind) for kind in pages)]
        logits, new, *written = session.run(outputs, feeds)
        pages.update(zip(pages, written, strict=True))
        return logits, new

    run(0, states[:, :7])
    logits, new = run(7, states[:, 7:])
    for count in range(rows, rows + drafts):
        with torch.no_grad():
            expected, following = head.step(embeddings[:, :count], states, torch.arange(count)[None])
        np.testing.assert_allclose(logits[0], expected[0, -1], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(new[0], following[0, -1], rtol=2e-3, atol=2e-3)
        states = torch.cat([states, following[:, -1:]], 1)
        logits, new = run(count, states[:, -1:])


def exported(model: Path, head: Path | None, folder: Path, checkpoints: tuple[int, ...], **options: Any) -> Path:
    """A bundle of `model` with random routers and a head that drafts until it has shown that it should not."""
    source = load_model(str(model))
    routers = random_routers(source, checkpoints, prompt(source.vocab_size, 40), bottleneck=16)
    folder.mkdir()
    routers.save(folder / "routers.safetensors")
    bundle = export(
        str(model),
        folder / "bundle",
        routers=folder / "routers.safetensors",
        draft_head="none" if head is None else str(head),
        **{"weights": "fp32"} | options,
    )
    manifest = open_bundle(bundle).manifest
    if manifest.drafter is not None:
        write_manifest(bundle, eager(manifest))
    return bundle


def eager(manifest: Manifest) -> Manifest:
    """The manifest of a drafter that drafts until it has shown that it should not."""
    assert manifest.drafter is not None
    return replace(manifest, drafter=replace(manifest.drafter, acceptance=(0.9,) * len(CONFIDENCES)))


def prompt(vocabulary: int, length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocabulary, length).tolist()


def drafts_cost_no_token(engine: Engine, **options: Any) -> int:
    """Asserts that lossless mode gives the tokens of full, greedy and sampled; returns how many the head drafted."""
    drafted = 0
    for seed in range(4):
        for temperature in (0.0, 0.8):
            given = {"max_new_tokens": 40, "temperature": temperature, "seed": seed, "stop_token_ids": []}
            ids = prompt(engine.manifest.model.vocab_size, 9, seed)
            full = engine.generate(ids, mode="full", **given)
            lossless = engine.generate(ids, mode="lossless", **given | {"threshold": 1.0, "prompt_lookup": 0} | options)
            assert lossless.tokens == full.tokens
            drafted += lossless.stats.learned_drafted
    return drafted
