"""Compares a bundle token for token on a model and a text: full depth with Hugging Face, exits with the oracle.

    python tools/checks/parity.py MODEL --dataset SPEC --checkpoints 4,8,12 [--routers FILE]

Exports MODEL twice: with calibrated routers (or `--routers`) and with seeded random ones whose scores spread over [0,
1]. Both run 64 prompts x 64 tokens at full depth, in lossless mode and at thresholds .3 .5 .7 .85 .95, a part of them
again with other `max_pending`. Prompts have 1 to 600 tokens. Exit code 1 when a token or an exit layer differs, or a
checkpoint never took part.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from tide_export.calibration.config import TideConfig
from tide_export.common.progress import stage
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.flow import export
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load
from tide_export.verify.parity import Check, check_exit, check_full, check_lossless

THRESHOLDS = (0.3, 0.5, 0.7, 0.85, 0.95)
PENDING = (1, 4, 16)


def prompts_from(sequences: list[list[int]], count: int, longest: int) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens, lengths spread evenly on a logarithmic scale."""
    lengths = np.unique(np.geomspace(1, longest, count).round().astype(int))
    lengths = np.resize(lengths, count)
    usable = [s for s in sequences if len(s) >= longest]
    if not usable:
        raise SystemExit(f"the dataset holds no text of {longest} tokens")
    return [usable[i % len(usable)][: int(n)] for i, n in enumerate(lengths)]


def compare(
    engine: Engine, source: SourceModel, routers: RouterSet, prompts: list[list[int]], new_tokens: int
) -> list[Check]:
    """Full depth, lossless mode, every threshold, and every max_pending on every fourth prompt."""
    checks = []
    with stage("comparing", total=len(prompts) * (2 + len(THRESHOLDS)) + len(prompts[::4]) * len(PENDING)) as advance:
        checks.append(check_full(engine, source, prompts, new_tokens, advance=advance))
        checks.append(check_lossless(engine, source, prompts, new_tokens, advance=advance))
        for threshold in THRESHOLDS:
            thresholds = [threshold] * len(routers.checkpoints)
            checks.append(
                check_exit(
                    engine, source, routers, prompts, new_tokens, thresholds, name=f"{threshold:g}", advance=advance
                )
            )
        for pending in PENDING:
            thresholds = [0.7] * len(routers.checkpoints)
            name = f"0.7, max_pending {pending}"
            checks.append(
                check_exit(engine, source, routers, prompts[::4], new_tokens, thresholds, pending, name, advance)
            )
    return checks


def rows(kind: str, checks: list[Check], depth: int) -> list[str]:
    lines = []
    for check in checks:
        exits = " ".join(f"{layers or 'lookup'}:{count}" for layers, count in sorted(check.exits.items()))
        error = f"{check.max_error:.1e}" if check.largest_logit else "-"
        same = 100 * check.same_as_full / max(check.tokens, 1)
        lines.append(
            f"| {kind} | {check.name} | {check.tokens} | {check.wrong} | {check.within_tolerance} | {error} "
            f"| {same:.1f} % | {check.layers_executed / max(check.tokens, 1):.2f} of {depth} | {exits} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--checkpoints", default="4,8,12")
    parser.add_argument(
        "--routers", type=Path, help="calibrated routers; without them they are calibrated on the dataset"
    )
    parser.add_argument("--calibration-samples", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest-prompt", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoints = tuple(int(c) for c in arguments.checkpoints.split(","))
    config = TideConfig(
        checkpoints=checkpoints,
        min_layers=0,
        calibration_dataset=arguments.dataset,
        calibration_samples=arguments.calibration_samples,
    )
    source = load_model(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    sequences = [s.ids.tolist() for s in read_sequences(arguments.dataset, tokenizer, arguments.longest_prompt, 256)]
    prompts = prompts_from(sequences, arguments.prompts, arguments.longest_prompt)
    table: list[str] = []
    holds = True
    with tempfile.TemporaryDirectory() as scratch:
        random_file = Path(scratch, "random.safetensors")
        random_routers(source, checkpoints, max(prompts, key=len)).save(random_file)
        for kind, routers in (("calibrated", arguments.routers), ("random", random_file)):
            bundle = export(arguments.model, Path(scratch, kind), routers=routers, config=config)
            engine = load(bundle, "cpu", arguments.threads)
            fitted = RouterSet.load(bundle / "routers.safetensors")
            checks = compare(engine, source, fitted, prompts, arguments.new_tokens)
            table += rows(kind, checks, source.num_layers)
            exits: Counter[int] = sum((check.exits for check in checks if not check.drafted), Counter())
            holds = holds and all(check.holds for check in checks) and set(exits) == {*checkpoints, source.num_layers}
            for check in checks:
                for difference in check.differences:
                    print(f"{kind} {check.name}: {difference}", file=sys.stderr)
    head = (
        "| routers | threshold | tokens | wrong | tolerated | max logit error | = full model | layers/token | exits |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    text = "\n".join([head, *table, "", "HOLDS" if holds else "DOES NOT HOLD"])
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
