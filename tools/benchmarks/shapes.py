"""Measures a bundle of a known shape: decoding, beside llama.cpp's tool if given, and runs over several tokens.

    python tools/benchmarks/shapes.py MODEL --make qwen3_5 [--checkpoints 7,14,21]
    tide-export export MODEL -o BUNDLE --weights int4
    python tools/benchmarks/shapes.py BUNDLE [--llama-bench FILE --gguf FILE] [--rounds 3] [--threads 2]

`--make` writes a model of a shape that people download, with random weights; what it says means nothing. `qwen3_5`:
the 0.8B, three of four layers with the gated delta rule. `qwen3_moe`: 4 of the 48 layers of the 30B-A3B. `gpt_oss`:
4 of the 24 layers of the 20B, its experts in MXFP4. `llama`: all of Llama-3.2-3B, and `llama_group4` with 6 heads of
K/V for 8, for `gpu_carry.py --shape`. `--checkpoints` adds MODEL/routers.safetensors, random routers.

Each round decodes 48 tokens at full depth after 32, then times llama-bench (`-n 48`) on the same shape, then runs over
1, 2, 4, 8 and 16 tokens, each taken back, as drafts are verified. A run's time is that of the quicker quarter.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from tide_export.common.formatting import table
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import NEVER_EXIT

PROMPT, TOKENS, PAST, RUNS, REPEATS = 32, 48, 128, (1, 2, 4, 8, 16), 12
LLAMA: dict[str, Any] = {
    **{"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28},
    **{"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    **{"max_position_embeddings": 4096, "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_group4": LLAMA | {"num_key_value_heads": 6},
    "qwen3_5": {
        **{"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 4096},
        **{"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    },
    "qwen3_moe": {
        **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
        **{"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
        **{"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2},
    },
    "gpt_oss": {
        **{"vocab_size": 32000, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32},
        **{"num_experts_per_tok": 4, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        **{"pad_token_id": 0},
    },
}
CLASSES = {
    "llama": "LlamaConfig",
    "llama_group4": "LlamaConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "gpt_oss": "GptOssConfig",
}
DEMO = Path(__file__).parents[2] / "demo" / "demo-llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--make", choices=SHAPES, help="write a model of that shape there instead")
    parser.add_argument("--checkpoints", metavar="N,N", help="of random routers beside it")
    parser.add_argument("--llama-bench", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.make:
        make_model(options.bundle, options.make)
        if options.checkpoints:
            add_routers(options.bundle, [int(layers) for layers in options.checkpoints.split(",")])
        return 0
    engine = load(options.bundle, provider="cpu", threads=options.threads)
    rates: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
    seconds: dict[int, list[float]] = {count: [] for count in RUNS}
    for _ in range(options.rounds):
        rates["ours"].append(_decoded(engine))
        if options.llama_bench:
            rates["llama.cpp"].append(_peer(options.llama_bench, options.gguf, options.threads))
        for count, taken in _runs(engine).items():
            seconds[count].append(taken)
    rows = [[name, " ".join(f"{rate:.1f}" for rate in found)] for name, found in rates.items() if found]
    print(table(["decoding", "tokens/s, by round"], rows))
    medians = {count: median(taken) for count, taken in seconds.items()}
    runs = [[str(count), f"{1e3 * taken:.1f}", f"{taken / medians[1]:.2f}x"] for count, taken in medians.items()]
    print(table(["tokens of a run", "ms", "over one"], runs))
    if options.json:
        options.json.write_text(json.dumps({"tokens_per_second": rates, "seconds": seconds}) + "\n")
    return 0


def _decoded(engine: Engine) -> float:
    """Tokens a second of one generation at full depth."""
    config = GenerationConfig(mode="full", max_new_tokens=TOKENS, temperature=1.0, seed=1, stop_token_ids=[])
    stats = engine.generate(list(range(5, 5 + PROMPT)), config).stats
    return (TOKENS - 1) / stats.decode_seconds


def _peer(program: Path, model: Path, threads: int) -> float:
    command = f"{program} -m {model} -t {threads} -p 0 -n {TOKENS} -r 3 -o json"
    said = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    return float(json.loads(said.stdout)[0]["avg_ts"])


def _runs(engine: Engine) -> dict[int, float]:
    """Seconds of a run over some tokens after `PAST`, which are then taken back."""
    state = engine.start([NEVER_EXIT] * len(engine.manifest.checkpoints))
    state.step(list(range(5, 5 + PAST)), full=True)
    found = {}
    for count in RUNS:
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            state.step([7] * count, full=True)
            taken.append(time.perf_counter() - started)
            state.rewind(PAST)
        found[count] = sorted(taken)[REPEATS // 4]
    return found


def make_model(folder: Path, shape: str) -> None:
    """Writes a model of that shape in bfloat16, the experts of gpt-oss in MXFP4."""
    import torch
    import transformers

    sizes = SHAPES[shape] | ({"num_local_experts": 2, "num_experts_per_tok": 2} if shape == "gpt_oss" else {})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = getattr(transformers, CLASSES[shape])(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    if shape == "gpt_oss":
        _with_mxfp4_experts(folder, SHAPES[shape])


def add_routers(folder: Path, checkpoints: list[int]) -> None:
    """Writes random routers of the sizes that calibration gives them."""
    import torch

    from tide_export.calibration.config import TideConfig
    from tide_export.model.source import load_model
    from tide_export.routers.random_routers import random_routers

    torch.set_default_dtype(torch.float32)
    sizes = TideConfig().router_bottleneck_dim, TideConfig().router_shortlist
    random_routers(load_model(folder), checkpoints, range(5, 69), *sizes).save(folder / "routers.safetensors")


def _with_mxfp4_experts(folder: Path, sizes: dict[str, Any]) -> None:
    """Replaces the few experts of a model by many with random codes, as gpt-oss stores them."""
    import torch
    from safetensors.torch import load_file, save_file

    file, experts = folder / "model.safetensors", sizes["num_local_experts"]
    tensors = load_file(file)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            _, inputs, outputs = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(119, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
        elif ".experts." in name or ".router." in name:
            tensors[name] = torch.randn(experts, *tensors[name].shape[1:]) * 0.02
    save_file(tensors, file, {"format": "pt"})
    settings = {"quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": sizes["num_experts_per_tok"]}
    written = json.loads((folder / "config.json").read_text()) | sizes | settings
    (folder / "config.json").write_text(json.dumps(written))


if __name__ == "__main__":
    sys.exit(main())
