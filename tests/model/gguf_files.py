"""Writes small GGUF files: a random llama or LFM2 with the demo model's tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

ROOT = Path(__file__).parents[2]
WIDTH, LAYERS, HEADS, KV_HEADS, FFN, KERNEL = 64, 2, 4, 2, 96, 3


def write_gguf(
    path: Path, kind: str = "F32", architecture: str = "llama", kinds: Mapping[str, str] | None = None
) -> Path:
    """Writes a model whose matrices are stored as `kind`, a name of `GGMLQuantizationType`.

    kinds: others, by a part of the tensor's name.
    """
    hybrid = architecture == "lfm2"
    tokenizer = json.loads((ROOT / "demo" / "demo-llama" / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0, KV_HEADS] if hybrid else KV_HEADS)
    if hybrid:
        writer.add_shortconv_l_cache(KERNEL)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)
    for name, shape in (_hybrid_shapes if hybrid else _shapes)(len(tokens)).items():
        weight = 0.1 * random.standard_normal(shape).astype(np.float32) + (len(shape) == 1)
        if len(shape) == 1 or "shortconv.conv" in name:
            writer.add_tensor(name, weight)
        else:
            own = [other for part, other in (kinds or {}).items() if part in name]
            stored = GGMLQuantizationType[own[0] if own else kind]
            writer.add_tensor(name, quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    narrow = WIDTH * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (vocab, WIDTH),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (narrow, WIDTH),
            "attn_v": (narrow, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (FFN, WIDTH),
            "ffn_up": (FFN, WIDTH),
            "ffn_down": (WIDTH, FFN),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def _hybrid_shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """Layer 0 is a convolution, layer 1 attention; the head is the embedding."""
    plain = _shapes(vocab)
    shapes = {name: shape for name, shape in plain.items() if not name.startswith(("output", "blk.0.attn_"))}
    head = (WIDTH // HEADS,)
    return shapes | {
        "token_embd_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
        "blk.0.shortconv.conv.weight": (WIDTH, KERNEL),
        "blk.0.shortconv.out_proj.weight": (WIDTH, WIDTH),
        "blk.1.attn_q_norm.weight": head,
        "blk.1.attn_k_norm.weight": head,
    }
