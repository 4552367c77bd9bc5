"""Tiny Llamas with the demo model's tokenizer: one whose deep layers add nothing, one of random weights."""

import shutil
from pathlib import Path

import torch
import transformers as tf
from tiny_configs import small_llama

from tide_export.probing.steps import Steps

DEMO = Path(__file__).parents[2] / "demo" / "demo-llama"
LAYERS, EARLY = 8, 4  # the checkpoint that calibration's defaults place
VOCABULARY = tf.AutoConfig.from_pretrained(DEMO).vocab_size


def write_llama(folder: Path, early: bool, layers: int = LAYERS, width: int = 64) -> Path:
    """Writes a Llama whose layers change the states much; with `early` those after EARLY add nothing."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(small_llama(VOCABULARY, width, layers, 256))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # distributions that are not flat, where any two draws would agree
        for number, layer in enumerate(model.model.layers):
            scale = 0.0 if early and number >= EARLY else 10.0
            layer.mlp.down_proj.weight.mul_(scale)
            layer.self_attn.o_proj.weight.mul_(scale)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def steps(depth: int = LAYERS, layer: float = 1.0, base: float = 1.0, block: float = 1.05) -> Steps:
    """Step times that no machine decides: a run over n tokens costs `block` of one at 2, and a little more at more."""
    blocks = {1: 1.0, 2: block, 3: block + 0.03, 5: block + 0.08, 9: block + 0.2, 16: block + 0.4, 17: block + 0.45}
    return Steps("fp32", depth, depth, base, layer, 0.03, blocks, 0.0, 10**6, 10**3, 1.0, 0.5)
