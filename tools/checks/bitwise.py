"""Compares the logits of requests that share a scheduler with those of each alone, bit for bit.

    python tools/checks/bitwise.py BUNDLE [--tokens 100000] [--slots 1,2,3,8,32]

Sends random prompts of 1 to 200 tokens, which partly begin alike, to schedulers with so many slots, with and without a
prefix cache, in every mode of the bundle, sampled. Each token's logits must be those of `Engine.generate` with the
same seed: of all bits a hash is kept. In mode lossless, with drafts, they must also be those of mode full. Exit code 1
when one differs.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tide_export.common.formatting import table
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits

Hashes = list[bytes]
LONGEST, NEW_TOKENS = 200, 24


class Recorder:
    """A `logits_processor` that changes nothing and keeps a hash of the logits after each text: of a text that is
    drafted first and verified later, the verified ones."""

    def __init__(self) -> None:
        self.by_length: dict[int, bytes] = {}

    def __call__(self, ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        self.by_length[len(ids)] = hashlib.blake2b(logits.tobytes(), digest_size=8).digest()
        return logits

    def hashes(self, prompt: Sequence[int], tokens: Sequence[int]) -> Hashes:
        """Those that the tokens after a prompt were chosen from."""
        return [self.by_length[len(prompt) + number] for number in range(len(tokens))]


def prompts_of(engine: Engine, count: int, random: np.random.Generator) -> list[list[int]]:
    """Prompts of which every other one begins with the first one's tokens."""
    limit = (engine.manifest.model.context_length or LONGEST + NEW_TOKENS) - NEW_TOKENS
    longest, vocabulary = min(LONGEST, limit), engine.manifest.model.vocab_size
    first = random.integers(0, vocabulary, longest).tolist()
    prompts = []
    for number in range(count):
        length = int(random.integers(1, longest + 1))
        shared = int(random.integers(0, length)) if number % 2 else 0
        prompts.append([*first[:shared], *random.integers(0, vocabulary, length - shared).tolist()])
    return prompts


def modes_of(engine: Engine) -> list[dict[str, Any]]:
    exits: dict[str, Any] = {"mode": "exit", "threshold": 0.6, "min_layers": 0}
    modes: list[dict[str, Any]] = [{"mode": "full"}]
    if engine.manifest.checkpoints:
        modes.append(exits)
    if engine.manifest.checkpoints and engine.manifest.kv_cache_strategy == "exact":
        modes.append({"mode": "lossless", "threshold": 0.6, "min_layers": 0})
    return modes


def compare(
    engine: Engine, prompts: Sequence[list[int]], options: dict[str, Any], slots: Sequence[int]
) -> list[tuple[int, bool, int, int]]:
    """Slots, whether there was a prefix cache, tokens and how many have other logits, of each scheduler."""

    def collected(ask: Callable[..., Any], options: dict[str, Any]) -> list[Hashes]:
        recorders = [Recorder() for _ in prompts]
        given = {**options, "temperature": 0.8, "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
        results = [ask(prompts[n], **given, seed=n, logits_processor=recorders[n]) for n in range(len(prompts))]
        tokens = [one.result().tokens if hasattr(one, "result") else one.tokens for one in results]
        return [recorders[n].hashes(prompts[n], tokens[n]) for n in range(len(prompts))]

    alone = collected(engine.generate, options)
    rows = []
    if options["mode"] == "lossless":
        rows.append((0, False, *different(alone, collected(engine.generate, {"mode": "full"}))))
    for count in slots:
        for cache in (0, 1 << 26):
            limits = SchedulerLimits(slots=count, prompt_tokens=64, prefix_cache_bytes=cache)
            with engine.scheduler(limits) as scheduler:
                rows.append((count, cache > 0, *different(alone, collected(scheduler.submit, options))))
    return rows


def different(expected: list[Hashes], found: list[Hashes]) -> tuple[int, int]:
    """How many tokens there are, and how many have other logits."""
    pairs = [pair for one, other in zip(expected, found, strict=True) for pair in zip(one, other, strict=True)]
    return len(pairs), sum(one != other for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=100_000, help="compared at least")
    parser.add_argument("--slots", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 3, 8, 32])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    engine = load(args.bundle, provider="cpu", threads=args.threads)
    modes = modes_of(engine)
    runs = len(modes) * 2 * len(args.slots)
    prompts = prompts_of(engine, max(2, -(-args.tokens // (runs * NEW_TOKENS))), np.random.default_rng(0))
    lines, total, wrong = [], 0, 0
    for options in modes:
        for slots, cached, tokens, differ in compare(engine, prompts, options, args.slots):
            beside = "mode full alone" if slots == 0 else f"{slots} slots{', prefix cache' if cached else ''}"
            lines.append([options["mode"], beside, tokens, differ])
            total, wrong = total + tokens, wrong + differ
    print(table(["mode", "alone, and", "tokens", "other logits"], lines))
    print(f"{total} tokens, {wrong} with other logits")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
