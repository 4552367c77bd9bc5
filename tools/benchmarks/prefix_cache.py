"""Times the first token of a prompt that a scheduler reads whole, and of the same prompt from its prefix cache.

    python tools/benchmarks/prefix_cache.py BUNDLE [--tokens 1000] [--rounds 5] [--threads N] [--json FILE]

Each round has a prompt of its own: read, submitted again, and submitted with 30 tokens after it, as the next turn of a
conversation. The first tokens of a prompt must be equal with and without the cache.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from harness.interleave import write_json

from tide_export.formatting import table
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits

READ, CACHED, TURN = "read", "cached", "cached, and 30 tokens after it"
TURN_TOKENS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="of a prompt (1000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    engine = load(options.bundle, provider="cpu", threads=options.threads)
    scheduler = engine.scheduler(SchedulerLimits(prefix_cache_bytes=2**30))
    order, vocabulary = random.Random(0), engine.manifest.model.vocab_size
    seconds: dict[str, list[float]] = {READ: [], CACHED: [], TURN: []}
    for number in range(options.rounds + 1):
        prompt = [order.randrange(vocabulary) for _ in range(options.tokens)]
        turn = [order.randrange(vocabulary) for _ in range(TURN_TOKENS)]
        found = {READ: _first(scheduler, prompt), CACHED: _first(scheduler, prompt)}
        if found[READ][1] != found[CACHED][1]:
            print("the first token is another one with the cache", file=sys.stderr)
            return 1
        found[TURN] = _first(scheduler, prompt + turn)
        for case, (taken, _) in found.items():
            seconds[case] += [taken] if number else []  # the first round warms up
    medians = {case: median(values) for case, values in seconds.items()}
    rows = [[case, f"{1e3 * taken:.1f}", f"{medians[READ] / taken:.1f}x"] for case, taken in medians.items()]
    print(table(["the prompt", "first token, ms", "sooner"], rows))
    if options.json:
        write_json({"tokens": options.tokens, "seconds": seconds}, options.json)
    return 0


def _first(scheduler: Scheduler, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token after a prompt, and this token."""
    started = time.perf_counter()
    handle = scheduler.submit(prompt, max_new_tokens=1, mode="full", stop_token_ids=[])
    token = next(handle)
    taken = time.perf_counter() - started
    handle.result()
    return taken, token


if __name__ == "__main__":
    sys.exit(main())
