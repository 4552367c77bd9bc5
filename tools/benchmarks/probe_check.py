"""Compares what `probe` predicts for a model with what its bundles then do, on this machine.

    python tools/benchmarks/probe_check.py MODEL BUNDLE [BUNDLE ...]

Run it where nothing else runs. The bundles are exports of MODEL with --weights fp32, bf16 or int4; one with a drafter
is compared with the drafter's prediction, one without with that of exits and n-grams, which supposes that
`tune --mode lossless` has chosen its drafting. Full depth is timed by `bench`;
the others as `export` and `draft` measure them, at temperature 0.8: exits with the thresholds of mode auto, lossless
mode on shipped prompts that `probe` has not seen. Exit code 1 where a measured value is outside of 10 % of the
prediction and outside of its range.
"""

import argparse
import sys
from pathlib import Path

from tide_export.bundle.opened import open_bundle
from tide_export.calibration.self_generated import encode_prompt
from tide_export.common.formatting import table
from tide_export.data.sequences import load_tokenizer
from tide_export.drafting.shipped_prompts import shipped_prompts
from tide_export.probing.flow import probe
from tide_export.probing.forecast import Forecast, Prediction
from tide_export.runtime.bench import bench
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.auto import exit_speedup
from tide_export.tuning.lossless import compare
from tide_export.tuning.request import LosslessRequest

ALLOWED = 0.1  # relative error
PROMPTS, NEW_TOKENS, SEED = 12, 64, 1

Row = tuple[str, str, Prediction, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("bundles", nargs="+", type=Path)
    arguments = parser.parse_args()
    report = probe(arguments.model)
    print(report.render(), "\n")
    print(f"probe took {report.seconds:.0f} s\n")
    forecasts = {mode.weights: mode for mode in report.modes}
    tokenizer = load_tokenizer(arguments.model)
    texts = shipped_prompts(SEED, PROMPTS, tokenizer.chat_template is not None)
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    rows = []
    for bundle in arguments.bundles:
        weights = open_bundle(bundle, verify=False).manifest.weights
        rows += [(str(bundle), *row) for row in measured(bundle, forecasts[weights], prompts)]
    shown = [(bundle, what, _shown(p), f"{now:.4g}", f"{p.expected / now:.2f}x") for bundle, what, p, now in rows]
    print(table(["bundle", "what", "predicted", "measured", "ratio"], shown, left=2))
    return int(any(missed(prediction, now) for _, _, prediction, now in rows))


def measured(bundle: Path, forecast: Forecast, prompts: list[list[int]]) -> list[tuple[str, Prediction, float]]:
    """Name, prediction and measured value of each mode of a bundle."""
    full = bench(bundle, prompt_tokens=128, repeat=5, provider="cpu").as_dict()["modes"][0]
    rows = [("full, tokens/s", forecast.tokens_per_second, 1e3 / full["decode_ms_per_token"])]
    engine = load(bundle, provider="cpu")
    auto = engine.auto
    if forecast.exit is not None and auto is not None and any(value < MAX_THRESHOLD for value in auto.thresholds):
        rows.append(("exit", forecast.exit.speed, exit_speedup(engine, auto.thresholds)[0]))
    if engine.manifest.drafter is not None:
        rows.append(("lossless, drafter", forecast.drafter, lossless(engine, prompts)))
    elif forecast.lossless is not None:
        rows.append(("lossless, exits", forecast.lossless, lossless(engine, prompts)))
    return rows


def lossless(engine: Engine, prompts: list[list[int]]) -> float:
    """Speed of lossless mode over full depth's, at temperature 0.8."""
    request = LosslessRequest(dataset="", prompts=len(prompts), new_tokens=NEW_TOKENS, temperature=0.8)
    return compare(engine, engine, prompts, request).speedup


def missed(prediction: Prediction, now: float) -> bool:
    """Tells whether a measured value is neither near the expected one nor in its range."""
    return abs(prediction.expected / now - 1) > ALLOWED and not prediction.low <= now <= prediction.high


def _shown(prediction: Prediction) -> str:
    return f"{prediction.expected:.4g} ({prediction.low:.4g}-{prediction.high:.4g})"


if __name__ == "__main__":
    sys.exit(main())
