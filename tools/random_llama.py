"""Writes a seeded random Llama, for measuring memory and speed at sizes that no small trained model has.

    python tools/random_llama.py OUT [--hidden 2048 --intermediate 5632 --layers 22 --heads 32 --kv-heads 4]
    python tools/random_llama.py OUT --hidden 3072 --intermediate 8192 --layers 28 --heads 24 --kv-heads 8
    python tools/random_llama.py OUT --gptq

The first is the shape of a 1.1-billion-parameter Llama, the second has 3.0 billion, the third has the layers' matrices
of the first in GPTQ's format, 4 bits in groups of 128. Weights are bfloat16, in shards of a gigabyte, made one at a
time: no more than one is ever in memory. The tokenizer is the demo model's. What it says means nothing.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

DEMO = Path(__file__).parents[1] / "demo" / "demo-llama"
SIZES = {"hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "kv-heads": 4, "vocab": 32000}
SIZES |= {"context": 2048}
SHARD = 10**9  # bytes of a file
DEVIATION = 0.02  # transformers' initializer_range
GROUP = 128
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gptq", action="store_true")
    arguments = parser.parse_args()
    quantization: dict[str, Any] = {"quantization_config": GPTQ} if arguments.gptq else {}
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
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **quantization,
    )
    arguments.out.mkdir(parents=True)
    config.save_pretrained(arguments.out)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    plan = split_torch_state_dict_into_shards(empty, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD)
    generator, file_of = torch.Generator().manual_seed(0), dict[str, str]()
    for file, keys in plan.filename_to_tensors.items():
        tensors: dict[str, torch.Tensor] = {}
        for key in keys:
            shape = empty[key].shape
            if arguments.gptq and key.endswith("_proj.weight"):
                tensors |= integers(key.removesuffix("weight"), shape, generator)
                continue
            one = torch.ones(shape) if "norm" in key else torch.randn(shape, generator=generator) * DEVIATION
            tensors[key] = one.to(torch.bfloat16)
        save_file(tensors, arguments.out / file, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": file_of}
        (arguments.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, arguments.out / name)
    print(f"{sum(tensor.numel() for tensor in empty.values()) / 1e9:.2f} billion parameters in {arguments.out}")


def integers(prefix: str, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns the tensors of a random matrix in GPTQ's format; its numbers deviate as the others do."""
    (outputs, inputs), low, high = shape, -(2**31), 2**31
    groups = inputs // GROUP
    deviation = ((16**2 - 1) / 12) ** 0.5  # of the integers
    return {
        f"{prefix}qweight": torch.randint(low, high, (inputs // 8, outputs), generator=generator, dtype=torch.int32),
        f"{prefix}qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),  # 8, less one
        f"{prefix}scales": torch.full((groups, outputs), DEVIATION / deviation, dtype=torch.float16),
    }


if __name__ == "__main__":
    main()
