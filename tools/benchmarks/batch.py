"""Times batches: tokens a second over the batch size at full depth, with exits and lossless, in one interleaved run.

    python tools/benchmarks/batch.py BUNDLE --dataset SPEC [--sizes 1,2,4,8,16,32] [--lossless 0,1]

Prompts are cut from documents of SPEC at lengths from half to one and a half times `--prompt-tokens`. A round gives
every case once, in a new random order: B sequences, `--new-tokens` after their prompts, of which the first is not
counted; the next round takes the next B prompts, of as many as the largest B. B = 1 is the one-sequence graph, so that
what a batch gains is against the best there is for one. Of each case the median over the rounds is shown, the ratio to
one sequence at full depth and the ratio to as many at full depth; only ratios within one run mean anything. Tokens of
every batch are compared with those one by one, in lossless mode with those at full depth (a difference is rounding:
they are counted, and how far apart the two best logits were is not known here).
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tide_export.common.formatting import table
from tide_export.data.documents import Documents
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.tokenizer import BundleTokenizer


@dataclass(frozen=True)
class Case:
    """One way to generate; `compaction` is the compaction_threshold, None where there is nothing to choose."""

    mode: str
    threshold: float | None = None
    compaction: float | None = None

    @property
    def title(self) -> str:
        if self.mode == "full":
            return "full depth"
        if self.mode == "lossless":
            return f"lossless, compaction {self.compaction:g}"
        return f"exits at {self.threshold:g}, compaction {self.compaction:g}"


@dataclass
class Measured:
    title: str
    batch: int
    tokens_per_second: float
    ratio: float  # to one sequence at full depth
    ratio_same_batch: float  # to as many sequences at full depth
    layers_per_token: float
    differing_tokens: int
    tokens: int


def main() -> None:
    options = _options()
    sizes = [int(size) for size in options.sizes.split(",")]
    engines = _engines(options, sizes)
    prompts = _prompts(options, max(sizes))
    cases = _cases(options)
    measured = [(case, size) for case in cases for size in sizes if size > 1 or _is_first_compaction(case, cases)]
    alone: dict[float | None, list[Generation]] = {}
    for case in cases:
        if case.threshold not in alone:  # None: full depth, whose tokens are those of lossless mode
            alone[case.threshold], _ = _run(engines[sizes[0]], case, prompts, options.new_tokens, together=False)
    seconds: dict[tuple[Case, int], list[float]] = {entry: [] for entry in measured}
    outcome: dict[tuple[Case, int], list[tuple[Generation, Generation]]] = {entry: [] for entry in measured}
    for size, engine in engines.items():
        engine.generate(prompts[:size], max_new_tokens=2)  # opens the networks
    order = random.Random(0)
    for number in range(options.rounds):
        order.shuffle(measured)
        for case, size in measured:
            places = [(number * size + place) % len(prompts) for place in range(size)]
            chosen = [prompts[place] for place in places]
            done, spent = _run(engines[size], case, chosen, options.new_tokens, together=size > 1)
            seconds[case, size].append(spent)
            outcome[case, size] += zip(done, (alone[case.threshold][place] for place in places), strict=True)
    rows = []
    full = {size: size * (options.new_tokens - 1) / median(seconds[cases[0], size]) for size in sizes}
    base = full.get(1, float("nan"))
    for case, size in sorted(measured, key=lambda entry: (cases.index(entry[0]), entry[1])):
        speed = size * (options.new_tokens - 1) / median(seconds[case, size])
        pairs = [pair for one, other in outcome[case, size] for pair in zip(one.tokens, other.tokens, strict=True)]
        layers = float(np.mean([one.stats.layers_run_per_token for one, _ in outcome[case, size]]))
        wrong = sum(a != b for a, b in pairs)
        rows.append(Measured(case.title, size, speed, speed / base, speed / full[size], layers, wrong, len(pairs)))
    print(_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _engines(options: argparse.Namespace, sizes: Sequence[int]) -> dict[int, Engine]:
    """On the CPU an engine for each size: one keeps the networks of the largest batch it has seen, and idle places are
    not free. On a GPU unused slots are not run, and the weights are there once."""
    if options.provider == "cpu":
        return {size: load(options.bundle, provider="cpu", threads=options.threads) for size in sizes}
    return dict.fromkeys(sizes, load(options.bundle, provider=options.provider, plugins=options.plugins))


def _cases(options: argparse.Namespace) -> list[Case]:
    """Full depth first."""
    cases = [Case("full")]
    for threshold in (float(value) for value in options.thresholds.split(",") if value):
        cases += [Case("exit", threshold, float(share)) for share in options.compactions.split(",")]
    for share in (float(value) for value in options.lossless.split(",") if value):
        cases.append(Case("lossless", None, share))
    return cases


def _is_first_compaction(case: Case, cases: Sequence[Case]) -> bool:
    """Alone there is nothing to choose: such cases are one."""
    return case.compaction == next(other.compaction for other in cases if other.mode == case.mode)


def _run(
    engine: Engine, case: Case, prompts: Sequence[list[int]], new_tokens: int, together: bool
) -> tuple[list[Generation], float]:
    """Generations of `prompts` and the seconds after every sequence had its first token (alone: of the first)."""
    request: dict[str, Any] = {"mode": case.mode, "stop_token_ids": []}
    if case.mode != "full":
        request |= {"threshold": case.threshold, "min_layers": 0}
    if not together:
        done = [engine.generate(prompt, max_new_tokens=new_tokens, **request) for prompt in prompts]
        return done, done[0].stats.decode_seconds
    started = time.perf_counter()
    done = engine.generate(list(prompts), max_new_tokens=new_tokens, compaction_threshold=case.compaction, **request)
    whole = time.perf_counter() - started
    return done, whole - max(one.stats.prefill_seconds for one in done)


def _prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    tokenizer, found = BundleTokenizer(Path(options.bundle)), list[list[int]]()
    lengths = np.linspace(0.5, 1.5, count) * options.prompt_tokens
    lengths = np.random.default_rng(0).permutation(lengths).astype(int)
    room = 2 * options.prompt_tokens
    for document in Documents(options.dataset):
        ids = tokenizer.encode(document)
        for start in range(0, len(ids) - room, room):
            found.append(ids[start : start + int(lengths[len(found)])])
            if len(found) == count:
                return found
    raise SystemExit(f"{options.dataset} holds text for {len(found)} prompts, not {count}")


def _table(rows: Sequence[Measured]) -> str:
    heads = ["case", "B", "tokens/s", "x one sequence, full depth", "x B sequences, full depth", "layers run per token"]
    speeds = ([f"{row.tokens_per_second:.0f}", f"{row.ratio:.2f}", f"{row.ratio_same_batch:.2f}"] for row in rows)
    cells = [
        [row.title, row.batch, *speed, f"{row.layers_per_token:.1f}", f"{row.differing_tokens} of {row.tokens}"]
        for row, speed in zip(rows, speeds, strict=True)
    ]
    return table([*heads, "tokens not as one by one"], cells)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--dataset", required=True, metavar="SPEC", help="text for the prompts")
    parser.add_argument("--sizes", default="1,2,4,8,16,32", metavar="B,B", help="(1,2,4,8,16,32)")
    parser.add_argument("--thresholds", default="0.85", metavar="T,T", help="for exits, '' for no exits (0.85)")
    parser.add_argument("--compactions", default="1", metavar="X,X", help="compaction thresholds for exits (1)")
    parser.add_argument(
        "--lossless", default="", metavar="X,X", help="lossless mode too, with these compaction thresholds"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="on average (64)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="(32)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--provider", default="cpu", help="cpu, cuda, tensorrt, tensorrt-rtx (cpu)")
    parser.add_argument("--plugins", metavar="LIBRARY", help="for tensorrt plans that hold plugins")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
