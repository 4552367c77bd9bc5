"""Whether the C++ runtime gives what the Python runtime gives, on any engine: tokens, exit layers and every count.

    python tools/checks/cpp_runtime.py BUNDLE TIDE_GENERATE [--provider NAME] [--plugins LIBRARY]

Prints both times per token. Exit code 1 where something differs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tide_export.runtime.engine import Engine, load  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "exit": {"threshold": 0.5},
    "exit, 1 may wait": {"threshold": 0.5, "max_pending": 1},
    "lossless": {"mode": "lossless", "threshold": 0.5},
}
SECONDS = ("prefill_seconds", "decode_seconds", "tokens_per_second")


def prompt_of(engine: Engine, length: int) -> list[int]:
    """Ids that are the same everywhere and repeat after half, so that prompt lookup finds drafts."""
    vocabulary = engine.manifest.model.vocab_size
    half = [(i * 7919) % vocabulary for i in range(1, (length + 1) // 2 + 1)]
    return (half + half)[:length]


def facts(tokens: list[int], reason: str | None, stats: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": tokens, "finish_reason": reason} | {k: v for k, v in stats.items() if k not in SECONDS}


def in_cpp(program: str, bundle: str, run: list[str], prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    line = [program, bundle, "--ids", ",".join(map(str, prompt)), "--ignore-eos", "--no-verify", *run, *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"'{program}' ended with {done.returncode}")
    return json.loads(done.stdout)


def compare(bundle: str, program: str, provider: str, plugins: str | None, tokens: int) -> int:
    """Prints a line for each mode and length of prompt; how many differ."""
    engine = load(bundle, provider, verify=False, plugins=plugins)
    run = ["--provider", provider, *(["--plugins", plugins] if plugins else [])]
    differ = 0
    for length in (1, 40, 200):
        prompt = prompt_of(engine, length)
        for case, options in CASES.items():
            generation = engine.generate(prompt, max_new_tokens=tokens, stop_token_ids=[], **options)
            other = in_cpp(program, bundle, run, prompt, options | {"max_new_tokens": tokens})
            cpp_stats, stats = other["stats"], json.loads(json.dumps(generation.stats.as_dict()))
            cpp_facts = facts(other["tokens"], other["finish_reason"], cpp_stats)
            wrong = [
                name
                for name, value in facts(generation.tokens, generation.finish_reason, stats).items()
                if cpp_facts[name] != value and not _close(cpp_facts[name], value)
            ]
            differ += bool(wrong)
            times = [1000 * one["decode_seconds"] / (tokens - 1) for one in (stats, cpp_stats)]
            verdict = f"differs in {', '.join(wrong)}" if wrong else "same"
            print(f"{length:4} tokens, {case:18} {verdict}; milliseconds per token {times[0]:.2f}, C++ {times[1]:.2f}")
    return differ


def _close(one: Any, other: Any) -> bool:
    return isinstance(other, float) and abs(one - other) <= 1e-9 * max(1.0, abs(other))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("program", help="tide_generate")
    parser.add_argument("--provider", default="auto", help="of both runtimes")
    parser.add_argument("--plugins", help="likewise")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    differ = compare(options.bundle, options.program, options.provider, options.plugins, options.new_tokens)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
