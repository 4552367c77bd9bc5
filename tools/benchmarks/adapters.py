"""What room for adapters costs, and adapters: a bundle made with `--lora-rank` beside one made without, interleaved.

    python tools/benchmarks/adapters.py BUNDLE BUNDLE_WITH_ROOM FOLDER [FOLDER ...] [--rounds N]

Full depth, one prompt of 128 tokens and eight at once; ratios to the bundle without room, medians over rounds.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from tide_export.common.formatting import table
from tide_export.runtime.engine import Engine, load

TEXT = "A gardener, a baker and a sailor met on the road and asked each other what the year had brought. " * 20
PROMPT_TOKENS, NEW_TOKENS, AT_ONCE = 128, 48, 8


def seconds(engine: Engine, adapter: str | None, prompts: list[list[int]], count: int) -> float:
    """Times `count` tokens after each prompt."""
    started = time.perf_counter()
    engine.generate(prompts, mode="full", stop_token_ids=[], max_new_tokens=count, adapter=adapter)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("with_room", type=Path)
    parser.add_argument("adapters", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    folders = {folder.name: folder for folder in options.adapters}
    plain, room = load(options.bundle), load(options.with_room, adapters=folders)
    cases: dict[str, tuple[Engine, str | None]] = {"no room": (plain, None), "room, no adapter": (room, None)}
    cases |= {name: (room, name) for name in folders}
    prompt = plain.tokenizer.encode(TEXT)[:PROMPT_TOKENS]
    kinds = ("a token", "the prompt", f"{AT_ONCE} at once")
    taken: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in cases for kind in kinds}
    for counted in range(options.rounds + 1):  # the first round warms up
        for name, case in cases.items():
            first = seconds(*case, [prompt], 1)
            token = (seconds(*case, [prompt], NEW_TOKENS) - first) / (NEW_TOKENS - 1)
            several = seconds(*case, [prompt] * AT_ONCE, NEW_TOKENS)
            for kind, value in zip(kinds, (token, first, several), strict=True):
                if counted:
                    taken[name, kind].append(value)
    headers, rows = ["", "ms a token", *kinds], []
    for name in cases:
        ratios = [
            median(own / other for own, other in zip(taken[name, kind], taken["no room", kind], strict=True))
            for kind in kinds
        ]
        rows.append([name, f"{1000 * median(taken[name, kinds[0]]):.2f}", *(f"{ratio:.2f}x" for ratio in ratios)])
    print(table(headers, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
