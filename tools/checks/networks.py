"""Checks a bundle's segment networks on one engine against the graph on the CPU, and times both.

    python tools/checks/networks.py BUNDLE ENGINE [--reference BUNDLE] [--sequences 1,8] [--new-tokens 48] [--rounds 3]
                                    [--threads N] [--plugins LIBRARY] [--json FILE]

ENGINE is a provider, `cpu-networks` (ONNX Runtime on the CPU) or `torch` (PyTorch on the CPU). The reference is the
same model in float32 (by default BUNDLE). First both are fed the same tokens, step by step: exit layers must be equal
where no score lies within rounding of its threshold, logits within the rounding of the networks' type. Then both
generate in every mode, alone and in lists: float32 must give equal tokens, other types are counted. Cases take turns.
Exit code 1 where something differs.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tide_export.bundle.opened import open_bundle
from tide_export.errors import TideError
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.runtime.generation import Generation
from tide_export.runtime.providers import NETWORKS
from tide_export.thresholds.resolve import MAX_THRESHOLD

# By precision: what logits may differ by, as a share of the largest, and scores, before a threshold between is
# undecided.
TOLERANCES = {"fp32": (1e-3, 1e-4), "fp16": (3e-2, 2e-2), "bf16": (0.15, 0.1), "fp8": (0.2, 0.2)}
LENGTHS = (1, 37, 2, 150, 18, 5, 64, 9)  # of prompts
STEPS = (30, *[1] * 40, 3, 7, 1, 1, 16, *[1] * 10)  # tokens of each step that both are fed
TORCH, GRAPH = "torch", "the graph on the CPU"


def opened(options: argparse.Namespace) -> Engine:
    """The engine to check."""
    bundle = open_bundle(options.bundle)
    if bundle.manifest.networks is None:
        sys.exit(f"networks: bundle '{options.bundle}' holds no segment networks")
    if options.engine != TORCH:
        threads = options.threads if options.engine == NETWORKS else None
        return open_engine(bundle, options.engine, threads, plugins=options.plugins)
    import torch

    from tide_export.verify.pytorch.networks import open_torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return open_torch(bundle)


def text_of(engine: Engine, count: int) -> list[int]:
    vocabulary = engine.manifest.model.vocab_size
    return [(i * 7919) % vocabulary for i in range(1, count + 1)]


def dividing(engine: Engine, ids: list[int]) -> list[float]:
    """The median score of every checkpoint."""
    sequence = engine.start([MAX_THRESHOLD] * len(engine.manifest.thresholds))
    scores = [sequence.step([token]).scores for token in ids]
    return [float(value) for value in np.median(scores, axis=0)]


def compare_steps(engine: Engine, reference: Engine, thresholds: list[float], precision: str) -> dict[str, Any]:
    """Both fed the same tokens; what differs by more than rounding."""
    of_logits, of_scores = TOLERANCES[precision]
    ids, at, largest, wrong, undecided, exits = text_of(reference, sum(STEPS)), 0, 0.0, [], 0, set()
    one, other = reference.start(thresholds, 4), engine.start(thresholds, 4)
    for number, size in enumerate(STEPS):
        a, b = one.step(ids[at : at + size]), other.step(ids[at : at + size])
        at += size
        near = bool((np.abs(a.scores - np.array(thresholds, np.float32)) < of_scores).any())
        if a.exit_layer != b.exit_layer:
            if near:
                undecided += 1
                break  # what runs from here on differs
            wrong.append(f"step {number}: left after {b.exit_layer} layers, not {a.exit_layer}")
            break
        exits.add(a.exit_layer)
        difference = float(np.abs(a.logits - b.logits).max() / np.abs(a.logits).max())
        largest = max(largest, difference) if difference == difference else float("nan")
        if not difference <= of_logits:
            wrong.append(f"step {number}: logits differ by {difference:.1e} of the largest")
    return {"steps": number + 1, "largest": largest, "undecided": undecided, "exits": sorted(exits), "wrong": wrong}


def timed(
    engine: Engine, prompts: list[list[int]], options: Mapping[str, Any], new_tokens: int
) -> tuple[list[Generation], float]:
    """Generations of a list (one prompt: alone), and tokens a second."""
    given: Any = prompts if len(prompts) > 1 else prompts[0]
    started = time.perf_counter()
    done = engine.generate(given, max_new_tokens=new_tokens, stop_token_ids=[], **options)
    seconds = time.perf_counter() - started
    done = done if isinstance(done, list) else [done]
    return done, sum(len(one.tokens) for one in done) / seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("engine", help=f"a provider, {NETWORKS} or {TORCH}")
    parser.add_argument("--reference", type=Path, help="the same model in float32 (BUNDLE)")
    parser.add_argument("--plugins", metavar="LIBRARY", help="for plans that hold plugins")
    parser.add_argument("--sequences", default="1,8", help="in a list; 1: alone (1,8)")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        result = run(options)
    except TideError as error:
        sys.exit(f"networks: {error}")
    print_result(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(result["wrong"]))


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine = opened(options)
    reference = load(options.reference or options.bundle, provider="cpu", threads=options.threads)
    info = engine.manifest.networks
    assert info is not None
    thresholds = dividing(reference, text_of(reference, 60))
    steps = compare_steps(engine, reference, thresholds, info.precision)
    wrong = list(steps["wrong"])
    modes: dict[str, dict[str, Any]] = {
        "full": {"mode": "full"},
        "exit": {"mode": "exit", "threshold": thresholds, "min_layers": 0, "max_pending": 4},
        "lossless": {"mode": "lossless", "threshold": thresholds, "min_layers": 0},
    }
    context = engine.manifest.model.context_length or 10**6
    lengths = [min(length, context - options.new_tokens - 1) for length in LENGTHS]
    sizes = [int(size) for size in options.sequences.split(",")]
    prompts = [text_of(reference, length + n)[n:] for n, length in enumerate(lengths * (max(sizes) // 8 + 1))]
    prompts = prompts[: max(sizes)]
    engines, order, rows = {options.engine: engine, GRAPH: reference}, random.Random(0), []
    for mode, given in modes.items():
        alone = [timed(reference, [prompt], given, options.new_tokens)[0][0] for prompt in prompts]
        found = [timed(engine, [prompt], given, options.new_tokens)[0][0] for prompt in prompts]
        for size in sizes:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            results: dict[str, list[Generation]] = {}
            for one in engines.values():
                timed(one, prompts[:size], given, options.new_tokens)  # each shape comes before it is recorded
                timed(one, prompts[:size], given, options.new_tokens)
            for _ in range(options.rounds):
                for name in order.sample(sorted(engines), len(engines)):
                    results[name], speed = timed(engines[name], prompts[:size], given, options.new_tokens)
                    speeds[name].append(speed)
            equal, tokens = equal_tokens(results[options.engine], alone[:size]), size * options.new_tokens
            beside = equal_tokens(results[options.engine], found[:size])
            row = {"mode": mode, "sequences": size, "equal": equal, "tokens": tokens, "alone": beside}
            rows.append({**row, "speeds": {name: median(values) for name, values in speeds.items()}})
            if info.precision == "fp32" and equal < tokens:
                wrong.append(f"{mode}, {size} sequences: {equal} of {tokens} tokens equal the reference's")
    about = {"bundle": options.bundle.name, "precision": info.precision, "engine": options.engine}
    return {**about, "steps": steps, "rows": rows, "wrong": wrong}


def equal_tokens(found: list[Generation], expected: list[Generation]) -> int:
    return sum(
        a == b
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=False)
    )


def print_result(result: Mapping[str, Any]) -> None:
    steps = result["steps"]
    print(f"{result['bundle']}, {result['precision']}, on {result['engine']}")
    print(
        f"{steps['steps']} steps on the same tokens: logits within {steps['largest']:.1e} of the largest, exits after "
        f"{', '.join(map(str, steps['exits']))} layers"
    )
    for row in result["rows"]:
        speeds = "; ".join(f"{name} {speed:.1f}" for name, speed in row["speeds"].items())
        print(
            f"{row['mode']:9} {row['sequences']:2} sequences: tokens a second: {speeds}; of {row['tokens']} tokens "
            f"{row['equal']} equal the reference's, {row['alone']} those of one by one"
        )
    for sentence in result["wrong"]:
        print(f"DIFFERS: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
