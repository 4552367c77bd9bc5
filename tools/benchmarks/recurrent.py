"""Measures a bundle with recurrent states: decoding, beside llama.cpp's tool if given, and runs over several tokens.

    python tools/benchmarks/recurrent.py MODEL --make
    tide-export export MODEL -o BUNDLE --weights int4
    python tools/benchmarks/recurrent.py BUNDLE [--llama-bench FILE --gguf FILE] [--rounds 3] [--threads 2]

`--make` writes a Qwen3.5 of the 0.8B shape with random weights; what it says means nothing. Each round decodes 48
tokens at full depth after 32, then times llama-bench (`-n 48`) on the same shape, then runs over 1, 2, 4, 8 and 16
tokens, each taken back, as drafts are verified. A run's time is that of the quicker quarter.
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
SHAPE: dict[str, Any] = {
    **{"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 4096},
    **{"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
}
DEMO = Path(__file__).parents[2] / "demo" / "demo-llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--make", action="store_true", help="write the model there instead")
    parser.add_argument("--llama-bench", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.make:
        make_model(options.bundle)
        return 0
    engine = load(options.bundle, provider="cpu", threads=options.threads)
    if not engine.manifest.model.states:
        print(f"{options.bundle} has no recurrent states", file=sys.stderr)
        return 1
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


def make_model(folder: Path) -> None:
    """Writes a Qwen3.5 of 24 layers, three of four with the gated delta rule, in bfloat16."""
    import torch
    import transformers

    config = transformers.Qwen3_5TextConfig(**SHAPE)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
