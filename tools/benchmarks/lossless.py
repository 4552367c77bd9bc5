"""Speed of lossless mode against full depth, per kind of text: interleaved generations, sampled and greedy.

    python tools/benchmarks/lossless.py BUNDLE --prompts tools/benchmarks/prompts/chat.txt --prompts .../edit.txt
    python tools/benchmarks/lossless.py BUNDLE --dataset SPEC --prompt-length 128
    python tools/benchmarks/lossless.py BUNDLE --prompts tools/benchmarks/prompts/chat.txt --streams 1,4,8

Each prompt is continued by both modes, interleaved in random order and with the same seed; the speed-up is full depth's
decoding time over lossless mode's, or with several streams (prompts at once) its wall clock. Lossless mode runs as the
bundle says, by its drafter alone, by exits alone, and by prompt lookup alone. Prompts of a file go through the bundle's
chat template where it has one. The exit code is 1 where a greedy token differs.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.chat import chat_prompts

from tide_export.common.formatting import table
from tide_export.common.progress import stage
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.tuning.prompts import draw_prompts


def settings_of(engine: Engine) -> dict[str, dict[str, Any]]:
    """The options of each setting of lossless mode."""
    settings: dict[str, dict[str, Any]] = {"the bundle's": {}}
    no_drafter: dict[str, Any] = {} if engine.manifest.drafter is None else {"drafter": 0}
    no_exits: dict[str, Any] = {"max_pending": 0} if engine.manifest.checkpoints else {}
    if no_drafter:
        settings["the drafter alone"] = {"prompt_lookup": 0, **no_exits}
    if no_exits:
        settings["exits alone"] = {"prompt_lookup": 0, **no_drafter}
    if len(settings) > 1:
        settings["prompt lookup alone"] = {"prompt_lookup": 15, **no_drafter, **no_exits}
    return settings


def measure(
    engine: Engine, prompts: list[list[int]], temperature: float, new_tokens: int, streams: int
) -> list[list[str]]:
    """Returns a row of the table for each setting."""
    settings = settings_of(engine)
    cases: dict[str, dict[str, Any]] = {"full": {"mode": "full"}}
    cases |= {name: {"mode": "lossless", **options} for name, options in settings.items()}
    order, seconds = random.Random(0), {name: list[float]() for name in cases}
    differ, drafted, accepted = (dict.fromkeys(cases, 0) for _ in range(3))
    groups = [range(first, min(first + streams, len(prompts))) for first in range(0, len(prompts), streams)]

    def generated(options: dict[str, Any], group: Sequence[int]) -> Sequence[Generation]:
        options = {"temperature": temperature, "max_new_tokens": new_tokens, **options}
        if streams == 1:
            return [engine.generate(prompts[group[0]], seed=group[0], **options)]
        return engine.generate([prompts[seed] for seed in group], seed=list(group), **options)

    for options in cases.values():  # not counted: what drafts cost for so many sequences is measured once
        generated(options, groups[0])
    with stage(f"temperature {temperature:g}, {streams} at once", total=len(groups)) as advance:
        for group in groups:
            tokens = {}
            for name in order.sample(list(cases), len(cases)):
                began = time.perf_counter()
                made = generated(cases[name], group)
                took = time.perf_counter() - began
                seconds[name].append(took if streams > 1 else made[0].stats.decode_seconds)
                tokens[name] = [one.tokens for one in made]
                drafted[name] += sum(one.stats.drafted for one in made)
                accepted[name] += sum(one.stats.accepted for one in made)
            for name in settings:
                differ[name] += sum(a != b for a, b in zip(tokens[name], tokens["full"], strict=True))
            advance(1)
    rows = []
    for name in settings:
        ratios = [full / one for full, one in zip(seconds["full"], seconds[name], strict=True) if one > 0]
        total = sum(seconds["full"]) / sum(seconds[name])
        rows.append([name, f"{temperature:g}", f"{streams}", f"{total:.2f}x", f"{median(ratios):.2f}x"])
        rows[-1] += [f"{min(ratios):.2f}x", f"{accepted[name]} of {drafted[name]}", str(differ[name])]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, action="append", default=[], metavar="FILE", help="one prompt a line")
    parser.add_argument("--dataset", metavar="SPEC", help="prompts are cut from this text")
    parser.add_argument("--prompt-length", type=int, default=128, metavar="N", help="of prompts that are cut (128)")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="prompts of each kind at most (40)")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="N", help="(96)")
    parser.add_argument("--temperatures", default="0.8,0", metavar="T,T", help="(0.8,0)")
    parser.add_argument("--streams", default="1", metavar="N,N", help="prompts at once (1)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(2)")
    options = parser.parse_args()
    engine = load(options.bundle, provider="cpu", threads=options.threads)
    tokenizer = BundleTokenizer(engine.bundle)
    kinds = {path.name: chat_prompts(engine.bundle, path) for path in options.prompts}
    if options.dataset is not None:
        drawn = draw_prompts(
            options.dataset,
            tokenizer,
            engine.manifest.calibration,
            length=options.prompt_length,
            count=options.count,
            per_document=20,
            seed=0,
        )
        kinds[options.dataset] = [list(prompt) for prompt in (*drawn.path, *drawn.calibration)]
    if not kinds:
        parser.error("give --prompts or --dataset")
    header = ["setting", "temperature", "streams", "speed-up", "median", "slowest", "drafts accepted", "unequal"]
    unequal = False
    for kind, prompts in kinds.items():
        rows = []
        for temperature in map(float, options.temperatures.split(",")):
            for streams in map(int, options.streams.split(",")):
                rows += measure(engine, prompts[: options.count], temperature, options.new_tokens, streams)
        print(f"{kind}: {min(len(prompts), options.count)} prompts, {options.new_tokens} new tokens at most\n")
        print(table(header, rows), flush=True)
        unequal |= any(row[-1] != "0" for row in rows if row[1] == "0")
    return int(unequal)


if __name__ == "__main__":
    sys.exit(main())
