"""Writes a seeded random Llama, for measuring memory and speed at sizes that no small trained model has.

    python tools/random_llama.py OUT [--hidden 2048 --intermediate 5632 --layers 22 --heads 32 --kv-heads 4]

The defaults are the shape of a 1.1-billion-parameter Llama. Weights are bfloat16 on disk, in shards of 1 GB; the
tokenizer is the demo model's. What it says means nothing.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

DEMO = Path(__file__).parents[1] / "demo" / "demo-llama"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    sizes = {
        "hidden": 2048,
        "intermediate": 5632,
        "layers": 22,
        "heads": 32,
        "kv_heads": 4,
        "vocab": 32000,
        "context": 2048,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        vocab_size=arguments.vocab,
        max_position_embeddings=arguments.context,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(arguments.out, max_shard_size="1GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, arguments.out / name)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters in {arguments.out}")


if __name__ == "__main__":
    main()
