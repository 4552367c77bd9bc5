"""Times what a checkout generates against another one, interleaved: medians of the ratios of rounds.

    python tools/benchmarks/two_trees.py OTHER BUNDLE [BUNDLE ...] [--loads 6] [--rounds 3] [--threads 2]

OTHER is a checkout with its library built, such as a worktree of the commit before a change. Each tree has a process,
which opens a bundle and runs every case once when it is asked; rounds alternate between the two, and so does which is
first. Where a process has its weights changes its time by up to a tenth, so both are started `--loads` times. The
greedy tokens must be equal. A ratio below 1 says that this checkout is faster.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT, LONG, NEW = 64, 512, 48
STREAMS = (8, 16)
Found = dict[str, Any]


def cases(engine: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Returns the arguments of `generate` by the names of the cases."""
    vocabulary = engine.manifest.model.vocab_size

    def prompt(length: int, seed: int = 0) -> list[int]:
        return [(7 + 31 * seed + 13 * i * i) % (vocabulary - 10) + 5 for i in range(length)]

    full = {"mode": "full", "max_new_tokens": NEW, "stop_token_ids": []}
    found: dict[str, tuple[Any, dict[str, Any]]] = {"full": (prompt(PROMPT), full)}
    if engine.manifest.checkpoints:
        exits = full | {"mode": "exit", "threshold": 0.5, "min_layers": 0}
        found["exit"] = (prompt(PROMPT), exits)
        found["lossless"] = (prompt(PROMPT), full | {"mode": "lossless", "prompt_lookup": 4})
    found[f"prompt of {LONG}"] = (prompt(LONG), full | {"max_new_tokens": 1})
    for streams in STREAMS:
        found[f"{streams} streams"] = ([prompt(PROMPT, seed) for seed in range(streams)], full)
    return found


def work(bundle: str, threads: int) -> None:
    """Opens the bundle and answers each line of the input with a line of seconds and tokens by case."""
    from tide_export.runtime.engine import load

    engine = load(bundle, provider="cpu", threads=threads, verify=False)
    for _ in sys.stdin:
        answer: dict[str, Found] = {}
        for name, (prompts, options) in cases(engine).items():
            started = time.perf_counter()
            made = engine.generate(prompts, **options)
            seconds = time.perf_counter() - started
            tokens = [one.tokens for one in made] if isinstance(made, list) else made.tokens
            answer[name] = {"seconds": seconds, "tokens": tokens}
        print(json.dumps(answer), flush=True)


@contextmanager
def worker(tree: Path, bundle: str, threads: int) -> Iterator[subprocess.Popen[str]]:
    """Starts the process of a tree; it ends with the context."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", bundle, "--threads", str(threads)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def asked(process: subprocess.Popen[str]) -> dict[str, Found]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("error: a process ended; its message is above")
    answer: dict[str, Found] = json.loads(line)
    return answer


def compare(other: Path, bundle: str, loads: int, rounds: int, threads: int) -> dict[str, float]:
    """Returns the median of this tree's seconds over the other's, by case.

    Raises:
        SystemExit: greedy tokens differ.
    """
    ratios: dict[str, list[float]] = {}
    for load in range(loads):
        trees = [ROOT, other] if load % 2 == 0 else [other, ROOT]
        with worker(trees[0], bundle, threads) as first, worker(trees[1], bundle, threads) as second:
            here, there = (first, second) if load % 2 == 0 else (second, first)
            asked(first), asked(second)  # pays for memory and caches
            for number in range(rounds):
                order = (here, there) if number % 2 == 0 else (there, here)
                found = {process: asked(process) for process in order}
                for name, one in found[here].items():
                    if one["tokens"] != found[there][name]["tokens"]:
                        raise SystemExit(f"error: the tokens of '{name}' differ")
                    ratios.setdefault(name, []).append(one["seconds"] / found[there][name]["seconds"])
    return {name: median(values) for name, values in ratios.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("bundles", nargs="*", metavar="BUNDLE")
    parser.add_argument("--loads", type=int, default=6, metavar="N", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--work", metavar="BUNDLE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.work, options.threads)
        return 0
    if options.other is None or not options.bundles:
        parser.error("name the other checkout and a bundle or more")
    for bundle in options.bundles:
        found = compare(
            options.other.resolve(), str(Path(bundle).resolve()), options.loads, options.rounds, options.threads
        )
        print(Path(bundle).name, *(f"{name} {ratio:.3f}" for name, ratio in found.items()), sep="  ", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
