"""Speed against changed tokens of everything a bundle can do, on real text in one interleaved run.

    python tools/benchmarks/modes.py BUNDLE... --dataset SPEC [--out FOLDER]
    python tools/benchmarks/modes.py BUNDLE... --prompts-file tools/benchmarks/prompts/chat.txt

The first bundle's full depth continues prompts cut from the text, or those of a file in its chat template, sampled at
`--temperature` (0.8; 0 is greedy, and a small model's greedy text runs into loops, which flatters drafts and exits
alike). Along these continuations, token by token, each bundle runs with the same threshold at every checkpoint
(`exit`), with the bundle's own thresholds, with those of mode `auto` where that is `exit`, and with every token exiting
at one checkpoint whatever its score (`static`, the naive baseline). *Changed tokens* is the share of positions at
which another token than full depth's is drawn with the same noise (greedy: is likeliest); speed is full depth's time
over that of the same steps, medians over prompts. Every case takes
one step per round, in a new random order, so that a machine that slows down slows all. Lossless mode
generates the continuation by itself, in one go, with the same seed.
Bundles of one model with different weights or routers can be compared. Writes
`modes.json` into the folder; the exit code is 1 when lossless mode gave another token at
temperature 0 (rounding may decide a draw among thousands of unlikely tokens).
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

import numpy as np
from harness.chat import chat_prompts

from tide_export.common.formatting import table
from tide_export.common.progress import stage
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.stepping import sample
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT, resolve_thresholds
from tide_export.tuning.prompts import draw_prompts

THRESHOLDS = "0.3,0.5,0.7,0.85,0.95"


class Text(NamedTuple):
    """A continuation by the first bundle's full depth.

    Attributes:
        said: its tokens.
        seed: it was sampled with.
    """

    said: list[int]
    seed: int


class Seen(NamedTuple):
    """One case in one step, or in all steps of a prompt."""

    changed: float  # share of positions
    layers: float  # passes a token
    seconds: float  # not of the step over the prompt


@dataclass
class Case:
    """A way to run a bundle; `run` continues a prompt as full depth did, step by step."""

    bundle: str
    mode: str
    setting: str
    run: Callable[[Any, Any], Iterator[Seen]]
    seen: list[Seen] = field(default_factory=list)  # of each prompt


@dataclass(frozen=True)
class Row:
    """A case on all prompts; `speedup` is the median over prompts of full depth's time over this one's."""

    bundle: str
    mode: str
    setting: str
    changed: float
    layers: float
    speedup: float


def continued(engine: Engine, prompt: list[int], options: argparse.Namespace, seed: int) -> Text:
    """The continuation of a prompt by full depth."""
    return Text(engine.generate(prompt, mode="full", stop_token_ids=[], **sampling(options, seed)).tokens, seed)


def sampling(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    return {"max_new_tokens": options.new_tokens, "temperature": options.temperature, "seed": seed}


def read(
    engine: Engine, thresholds: Sequence[float], temperature: float, prompt: list[int], text: Text
) -> Iterator[Seen]:
    """Steps along a continuation."""
    sizes = np.cumsum(engine.manifest.segment_sizes)
    state = engine.start(thresholds)
    state.step(prompt)
    for position, (token, following) in enumerate(pairwise(text.said), len(prompt) + 1):
        started = time.perf_counter()
        result = state.step([token])
        seconds = time.perf_counter() - started
        drawn = sample(result.logits, position, temperature=temperature, seed=text.seed)
        yield Seen(drawn != following, sizes[result.segments_run - 1], seconds)


def generate(engine: Engine, mode: str, options: argparse.Namespace, prompt: list[int], text: Text) -> Iterator[Seen]:
    """The same continuation by `Engine.generate`."""
    out = engine.generate(prompt, mode=mode, stop_token_ids=[], **sampling(options, text.seed))
    changed = np.not_equal(out.tokens[1:], text.said[1:])
    yield Seen(float(changed.mean()), fmean(out.stats.layers_run[1:]), out.stats.decode_seconds)


def cases_of(name: str, engine: Engine, options: argparse.Namespace) -> list[Case]:
    """Returns all cases of a bundle but full depth."""
    manifest = engine.manifest
    thresholds = [float(value) for value in options.thresholds.split(",")]
    count = len(manifest.checkpoints)
    default = resolve_thresholds(manifest.checkpoints, manifest.thresholds, manifest.min_layers)
    settings = {f"{value:g}": [value] * count for value in thresholds} | {"the bundle's": default}
    if engine.auto is not None and engine.auto.mode == "exit":
        settings["auto"] = list(engine.auto.thresholds)
    cases = [
        Case(name, "exit", setting, partial(read, engine, values, options.temperature))
        for setting, values in settings.items()
    ]
    for c, layers in enumerate(manifest.checkpoints):
        always = [ALWAYS_EXIT if k == c else NEVER_EXIT for k in range(count)]
        cases.append(Case(name, "static", f"layer {layers}", partial(read, engine, always, options.temperature)))
    tuned = "tuned" if manifest.drafting else ""
    cases.append(Case(name, "lossless", tuned, partial(generate, engine, "lossless", options)))
    return cases


def interleaved(runs: Sequence[Iterator[Seen]], order: random.Random) -> list[list[Seen]]:
    """All that `runs` give, one step of each after one of every other."""
    seen: list[list[Seen]] = [[] for _ in runs]
    going = list(range(len(runs)))
    while going:
        order.shuffle(going)
        for number in list(going):
            step = next(runs[number], None)
            if step is None:
                going.remove(number)
            else:
                seen[number].append(step)
    return seen


def measure(engines: dict[str, Engine], prompts: Sequence[list[int]], options: argparse.Namespace) -> list[Row]:
    name, first = next(iter(engines.items()))
    off = [NEVER_EXIT] * len(first.manifest.checkpoints)
    stepped = Case(name, "full", "", partial(read, first, off, options.temperature))
    generated = Case(name, "full", "", partial(generate, first, "full", options))
    cases = [stepped]
    for called, engine in engines.items():
        cases += cases_of(called, engine, options)
    if any(case.mode == "lossless" for case in cases):
        cases.append(generated)
    order = random.Random(0)
    with stage("measuring", total=len(prompts)) as advance:
        for seed, prompt in enumerate(prompts):
            text = continued(first, prompt, options, seed)
            for case, seen in zip(cases, interleaved([case.run(prompt, text) for case in cases], order), strict=True):
                changed, layers = fmean(s.changed for s in seen), fmean(s.layers for s in seen)
                case.seen.append(Seen(changed, layers, sum(s.seconds for s in seen)))
            advance(1)
    rows = []
    for case in cases:
        if case is generated:
            continue
        against = generated if case.mode == "lossless" else stepped
        ratios = [full.seconds / one.seconds for full, one in zip(against.seen, case.seen, strict=True)]
        changed, layers = fmean(s.changed for s in case.seen), fmean(s.layers for s in case.seen)
        rows.append(Row(case.bundle, case.mode, case.setting, changed, layers, median(ratios)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", metavar="SPEC", help="prompts are cut from this text")
    source.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="(200)")
    parser.add_argument("--prompts-per-document", type=int, default=20, metavar="N", help="(20)")
    parser.add_argument("--prompt-length", type=int, default=48, metavar="N", help="(48)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="(0.8)")
    parser.add_argument("--thresholds", default=THRESHOLDS, metavar="T,T", help=f"({THRESHOLDS})")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = {path.name: load(path, provider="cpu", threads=options.threads) for path in options.bundles}
    first = next(iter(engines.values()))
    if options.prompts_file is not None:
        prompts, of = chat_prompts(first.bundle, options.prompts_file)[: options.prompts], options.prompts_file.name
    else:
        drawn = draw_prompts(
            options.dataset,
            BundleTokenizer(options.bundles[0]),
            first.manifest.calibration,
            length=options.prompt_length,
            count=options.prompts,
            per_document=options.prompts_per_document,
            seed=0,
        )
        prompts = [list(prompt) for prompt in (*drawn.path, *drawn.calibration)]
        of = f"{options.prompt_length} tokens"
    rows = measure(engines, prompts, options)
    depth = first.manifest.model.num_layers
    text = table(
        ["bundle", "mode", "threshold", "changed tokens", "layers per token", "speed over full depth"],
        [
            [
                row.bundle,
                row.mode,
                row.setting,
                f"{100 * row.changed:.1f} %",
                f"{row.layers:.2f} of {depth}",
                f"{row.speedup:.2f}x",
            ]
            for row in rows
        ],
    )
    said = f"{len(prompts)} prompts of {of}, {options.new_tokens} new ones each, "
    said += f"temperature {options.temperature:g}, {options.threads} threads"
    (options.out / "modes.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{said}\n{text}")
    wrong = any(row.changed > 0 for row in rows if row.mode == "lossless" and row.bundle == rows[0].bundle)
    return int(wrong and options.temperature == 0)


if __name__ == "__main__":
    sys.exit(main())
