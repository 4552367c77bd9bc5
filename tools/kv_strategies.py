"""What `kv_cache_strategy` exact and propagate are worth beside each other: quality and speed on the same text.

    python tools/kv_strategies.py MODEL --routers routers.safetensors --dataset SPEC [--out FOLDER]

Exports MODEL twice with the same routers. For each threshold, both engines read the same documents: a prompt, then one
token of the text after the other. Quality is the share of positions at which the greedy token is the full model's, and
the mean divergence of its distribution from the full model's; speed is the time of these steps over that of full depth,
each prompt in turns, medians over prompts. Writes `kv-strategies.md`, `.json` and `.png` into the folder.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.figure import Figure

from tide_export.calibrate.sequences import load_tokenizer, read_sequences
from tide_export.config import TideConfig
from tide_export.manifest import KV_CACHE_STRATEGIES
from tide_export.pipeline import export
from tide_export.progress import stage
from tide_export.runtime.engine import Engine, load
from tide_export.tables import table
from tide_export.thresholds import OFF

THRESHOLDS = (0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class Row:
    """One strategy at one threshold.

    Attributes:
        agreement: share of positions whose greedy token is the full model's.
        kl: mean KL(full || exit), nats.
        layers: mean layer passes of a step.
        speedup: full depth's time over this one's.
    """

    strategy: str
    threshold: float
    agreement: float
    kl: float
    layers: float
    speedup: float


@dataclass(frozen=True)
class Reading:
    """What an engine said along one text, and how long its steps took."""

    logits: np.ndarray  # [P, V]
    layers: float
    seconds: float


def read(engine: Engine, ids: Sequence[int], prompt: int, threshold: float) -> Reading:
    """Steps over `ids`: the first `prompt` at once and untimed, then one by one."""
    sizes = np.cumsum(engine.manifest.segment_sizes)
    state = engine.start([threshold] * len(engine.manifest.checkpoints), room=len(ids))
    state.step(ids[:prompt])
    logits, layers, seconds = [], [], 0.0
    for token in ids[prompt:]:
        started = time.perf_counter()
        result = state.step([token])
        seconds += time.perf_counter() - started
        logits.append(result.logits.copy())
        layers.append(sizes[result.segments_run - 1])
    return Reading(np.stack(logits), fmean(layers), seconds)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compare(engines: dict[str, Engine], texts: Sequence[Sequence[int]], prompt: int) -> list[Row]:
    cases = [(name, threshold) for name in engines for threshold in THRESHOLDS]
    agreement: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    kl, layers, ratios = ({case: list[float]() for case in cases} for _ in range(3))
    order = random.Random(0)
    with stage("reading", total=len(texts)) as advance:
        for ids in texts:
            turns = [*cases, ("exact", OFF)]
            order.shuffle(turns)
            found = {turn: read(engines[turn[0]], ids, prompt, turn[1]) for turn in turns}
            full = found["exact", OFF]
            target = log_softmax(full.logits)
            for case in cases:
                answer = log_softmax(found[case].logits)
                agreement[case].append((answer.argmax(-1) == target.argmax(-1)).mean())
                kl[case].append((np.exp(target) * (target - answer)).sum(-1).mean())
                layers[case].append(found[case].layers)
                ratios[case].append(full.seconds / found[case].seconds)
            advance(1)
    return [
        Row(*case, fmean(agreement[case]), fmean(kl[case]), fmean(layers[case]), median(ratios[case])) for case in cases
    ]


def draw(rows: Sequence[Row], name: str, file: Path) -> None:
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, strategy in enumerate(KV_CACHE_STRATEGIES):
        own = [row for row in rows if row.strategy == strategy]
        axes.plot(
            [row.speedup for row in own], [100 * row.agreement for row in own], "o-", label=strategy, color=f"C{number}"
        )
        for row in own:
            axes.annotate(f"{row.threshold:g}", (row.speedup, 100 * row.agreement), fontsize=8)
    axes.set(title=name, xlabel="full depth's time over this one's", ylabel="tokens equal to the full model's, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--routers", required=True, metavar="FILE")
    parser.add_argument("--dataset", required=True, metavar="SPEC")
    parser.add_argument("--texts", type=int, default=16, metavar="N", help="documents read (16)")
    parser.add_argument("--prompt-length", type=int, default=48, metavar="N", help="(48)")
    parser.add_argument("--positions", type=int, default=96, metavar="N", help="compared in each (96)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER")
    options = parser.parse_args()
    length = options.prompt_length + options.positions
    sequences = read_sequences(options.dataset, load_tokenizer(options.model), length, 50 * options.texts)
    first = {sequence.document: sequence.ids.tolist() for sequence in sequences if len(sequence.ids) == length}
    texts = list(first.values())[: options.texts]
    if not texts:
        raise SystemExit(f"no document of {options.dataset} has {length} tokens")
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for strategy in KV_CACHE_STRATEGIES:
            config = TideConfig(kv_cache_strategy=strategy, min_layers=0)
            bundle = export(options.model, Path(folder) / strategy, routers=options.routers, config=config)
            engines[strategy] = load(bundle, provider="cpu", threads=options.threads)
        rows = compare(engines, texts, options.prompt_length)
        depth = engines["exact"].manifest.model.num_layers
    name = Path(options.model).name
    headers = ["model", "strategy", "threshold", "tokens kept", "KL, nats", "layer passes", "x full depth's speed"]
    text = table(
        headers,
        [
            [
                name,
                row.strategy,
                f"{row.threshold:g}",
                f"{100 * row.agreement:.1f} %",
                f"{row.kl:.4f}",
                f"{row.layers:.2f} of {depth}",
                f"{row.speedup:.2f}x",
            ]
            for row in rows
        ],
    )
    (options.out / "kv-strategies.md").write_text(text + "\n")
    (options.out / "kv-strategies.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    draw(rows, name, options.out / "kv-strategies.png")
    print(f"{len(texts)} documents, {len(texts) * options.positions} positions\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
