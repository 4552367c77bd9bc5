"""Compares what requests get in company with what each gets alone, to the bit.

    python tools/checks/company.py BUNDLE... [--cases 20000] [--seed 0]
    python tools/checks/company.py BUNDLE --seed 0 --only ROUND

Each round draws a company of requests, whose prompts partly begin alike, in every mode of the bundle, with and without
sampling, penalties and adapters. They run alone, on one thread and on two; in a list; and in a scheduler, with slots,
prompt chunks and a prefix cache drawn too, into which they come between its steps, and of which some are cancelled.
Tokens, exits and log-probabilities must be the same in all (of a cancelled request those that it has); in mode
lossless, tokens and log-probabilities are also those of mode full. A round that differs is one line to run again. Exit
code 1 when one does.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide_export.common.formatting import table
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation, TokenLogprobs
from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.scheduler import SchedulerLimits

LONGEST, NEW_TOKENS, MOST = 120, 24, 10  # tokens of a prompt and of an answer, and requests of a round
CANCELLED = 0.15  # share of the requests in schedulers
Made = tuple[list[int], list[TokenLogprobs], list[int]]  # tokens, their log-probabilities and exits


@dataclass(frozen=True)
class Engines:
    """One bundle on one thread, and on two."""

    one: Engine
    two: Engine


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    config: GenerationConfig


def company(engine: Engine, chance: random.Random) -> list[Asked]:
    """Draws the requests of a round."""
    model = engine.manifest.model
    longest = min(LONGEST, (model.context_length or LONGEST + NEW_TOKENS) - NEW_TOKENS)
    beginning = [chance.randrange(model.vocab_size) for _ in range(longest)]
    asked = []
    for _ in range(chance.randint(2, MOST)):
        length = chance.randint(1, longest)
        alike = chance.choice([0, chance.randint(0, length)])
        rest = [chance.randrange(model.vocab_size) for _ in range(length - alike)]
        asked.append(Asked([*beginning[:alike], *rest], config_of(engine, chance)))
    return asked


def config_of(engine: Engine, chance: random.Random) -> GenerationConfig:
    """Draws the options of a request."""
    exits: dict[str, Any] = {"threshold": chance.choice([0.0, 0.3, 0.6, 0.9]), "min_layers": 0}
    modes: list[dict[str, Any]] = [{"mode": "full"}]
    if engine.manifest.checkpoints:
        modes.append({"mode": "exit", "max_pending": chance.choice([0, 3, 64])} | exits)
        modes.append({"mode": "lossless", "prompt_lookup": chance.choice([0, 3])} | exits)
    sampled: dict[str, Any] = {"temperature": chance.choice([0.6, 1.0]), "top_p": chance.choice([0.9, 1.0])}
    return GenerationConfig(
        **chance.choice(modes),
        **(sampled | {"seed": chance.randrange(1000)} if chance.random() < 0.5 else {}),
        repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        adapter=chance.choice([None, *engine.adapters]),
        max_new_tokens=chance.randint(1, NEW_TOKENS),
        logprobs=3,
        stop_token_ids=(),
    )


def made_of(config: GenerationConfig, generation: Generation | RequestHandle) -> Made:
    """What must not depend on company. In mode lossless exits tell how a token was drafted, which may."""
    stats = generation.stats
    exits = [] if config.mode == "lossless" else list(stats.exit_layer)
    return list(generation.tokens), list(generation.logprobs or ()), exits


def together(engine: Engine, asked: Sequence[Asked], chance: random.Random) -> list[tuple[Made, bool]]:
    """What each gets in a scheduler, and whether all of it; requests come, and some go, between steps."""
    limits = SchedulerLimits(
        slots=chance.choice([1, 2, 3, 8]),
        prompt_tokens=chance.choice([4, 7, 32, 512]),
        prefix_cache_bytes=chance.choice([0, 1 << 24]),
    )
    scheduler = engine.scheduler(limits)
    handles, leaves = list[RequestHandle](), dict[int, int]()
    while len(handles) < len(asked) or any(handle.finish_reason is None for handle in handles):
        while len(handles) < len(asked) and chance.random() < 0.4:
            if chance.random() < CANCELLED:
                leaves[len(handles)] = chance.randint(0, NEW_TOKENS)
            one = asked[len(handles)]
            handles.append(scheduler.submit(one.prompt, one.config))
        scheduler.step()
        for number, tokens in leaves.items():
            if len(handles[number].tokens) >= tokens:
                handles[number].cancel()
    return [
        (made_of(one.config, handle), handle.finish_reason != "cancelled")
        for one, handle in zip(asked, handles, strict=True)
    ]


def as_list(engine: Engine, asked: Sequence[Asked]) -> list[Made]:
    """What each gets in a list, with the options of the first."""
    config = asked[0].config
    seeds = None if config.seed is None else [number for number, _ in enumerate(asked)]
    done = engine.generate([one.prompt for one in asked], replace(config, seed=seeds))
    return [made_of(config, one) for one in done]


def begins(whole: Made, part: Made) -> bool:
    """Whether `part` is the beginning of `whole`."""
    tokens, logprobs, exits = part
    return part == (whole[0][: len(tokens)], whole[1][: len(logprobs)], whole[2][: len(exits)])


def differences(engines: Engines, chance: random.Random) -> tuple[dict[str, int], dict[str, int]]:
    """Runs a round; returns how many requests were compared, and how many differ, by the kind of company."""
    engine, asked = engines.one, company(engines.one, chance)
    alone = [made_of(one.config, engine.generate(one.prompt, one.config)) for one in asked]
    compared, differ = dict[str, int](), dict[str, int]()

    def compare(kind: str, same: Sequence[bool]) -> None:
        compared[kind] = compared.get(kind, 0) + len(same)
        differ[kind] = differ.get(kind, 0) + same.count(False)

    found = together(engine, asked, chance)
    compare(
        "scheduler",
        [one == made if whole else begins(one, made) for one, (made, whole) in zip(alone, found, strict=True)],
    )
    first = asked[0].config
    seeds = [number if first.seed is not None else None for number, _ in enumerate(asked)]
    same = [
        made_of(first, engine.generate(one.prompt, replace(first, seed=seed)))
        for one, seed in zip(asked, seeds, strict=True)
    ]
    compare("list", [one == made for one, made in zip(same, as_list(engine, asked), strict=True)])
    one = asked[0]
    compare("two threads", [made_of(one.config, engines.two.generate(one.prompt, one.config)) == alone[0]])
    for one, (tokens, logprobs, _) in zip(asked, alone, strict=True):
        if one.config.mode == "lossless":
            full = replace(one.config, mode="full", threshold=None, min_layers=None, prompt_lookup=None)
            compare("mode full", [made_of(full, engine.generate(one.prompt, full))[:2] == (tokens, logprobs)])
    return compared, differ


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    parser.add_argument("--cases", type=int, default=20_000, metavar="N", help="compared at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the rounds (%(default)s)")
    parser.add_argument("--only", type=int, metavar="ROUND", help="of each bundle, run this round alone")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER", help="for bundles with room")
    options = parser.parse_args(argv)
    adapters = dict(one.split("=", 1) for one in options.adapter)
    lines, total, wrong = list[list[object]](), 0, 0
    for bundle in options.bundles:
        room = adapters if load(bundle).manifest.model.lora is not None else {}
        one, two = (load(bundle, provider="cpu", threads=threads, adapters=room) for threads in (1, 2))
        compared, differ = dict[str, int](), dict[str, int]()
        number = 0 if options.only is None else options.only
        while sum(compared.values()) < options.cases / len(options.bundles):
            round_compared, round_differ = differences(Engines(one, two), random.Random(f"{options.seed} {number}"))
            for kind, count in round_compared.items():
                compared[kind] = compared.get(kind, 0) + count
                differ[kind] = differ.get(kind, 0) + round_differ[kind]
            if any(round_differ.values()):
                again = f"python tools/checks/company.py {bundle} --seed {options.seed} --only {number}"
                print(
                    f"differs: {', '.join(kind for kind, count in round_differ.items() if count)}: {again}", flush=True
                )
            if options.only is not None:
                break
            number += 1
        lines += [[bundle, kind, count, differ[kind]] for kind, count in compared.items()]
        total, wrong = total + sum(compared.values()), wrong + sum(differ.values())
    print(table(["bundle", "alone, and in a", "requests", "other"], lines))
    print(f"{total} cases, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
