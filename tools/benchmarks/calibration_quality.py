"""What routers are worth: labels and lenses compared at equal quality, on documents that were not used to fit them.

    python tools/benchmarks/calibration_quality.py MODEL... --dataset SPEC [--out FOLDER] [--variant NAME]...

For each model six calibrations on the same text and the same split: TIDE's (cosine label, its own router, the state as
it is), TIDE's router taught with `unchanged`, ours (`unchanged`, a shortlist of the default 256 head rows), with 1,024
rows and with all of them, which bounds what any shortlist can tell, and ours with a lens. Each is measured on its test
documents: thresholds are chosen on one half of them and applied to the other, and the layers per token are
read off where 1, 2 and 5 % of that other half's tokens are changed, at temperature 0.8. Router efficiency is layers
saved over what a perfect router saves at the same checkpoints, those included that a label gave up because no token
may leave there. Writes `table.json` and `table.md` into the folder.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

from tide_export.calibration.assessment import Outcome
from tide_export.calibration.config import TideConfig
from tide_export.calibration.flow import calibrate
from tide_export.common.formatting import table
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel, load_model
from tide_export.report.findings import Findings, investigate

EPSILONS = (0.01, 0.02, 0.05)
IDENTITY: dict[str, Any] = {"label": "unchanged", "exit_strategy": "identity"}
VARIANTS: dict[str, dict[str, Any]] = {
    "cosine / identity (TIDE)": IDENTITY | {"label": "cosine", "router_shortlist": 0},
    "unchanged / identity, TIDE's router": IDENTITY | {"router_shortlist": 0},
    "unchanged / identity": IDENTITY,
    "unchanged / identity, 1,024 rows": IDENTITY | {"router_shortlist": 1024},
    "unchanged / identity, the whole head": IDENTITY | {"router_shortlist": 1 << 20},
    "unchanged / lens": {"label": "unchanged", "exit_strategy": "lens"},
}


@dataclass(frozen=True)
class Row:
    """One calibration at one share of changed tokens.

    Attributes:
        layers: per token; `depth` where so few cannot be had with exits.
        exits: share of tokens leaving at each checkpoint.
        perfect_layers: per token, of a perfect router.
        router_layers: what routers and lenses cost a token, in layers.
    """

    model: str
    variant: str
    changed: float
    layers: float
    depth: int
    exits: tuple[float, ...]
    perfect_layers: float
    router_layers: float

    @property
    def efficiency(self) -> float:
        return (self.depth - self.layers) / (self.depth - self.perfect_layers)


def at_changed(curve: Sequence[Outcome], epsilon: float, depth: int) -> tuple[float, tuple[float, ...]]:
    """Layers per token where the measured curve passes `epsilon` changed tokens, between its two nearest points, and
    exit shares of the nearest point within it. Nothing exits where no point is."""
    path = sorted(curve, key=lambda outcome: outcome.layers)
    kept = [i for i, outcome in enumerate(path) if outcome.change.changed <= epsilon]
    if not kept:
        return float(depth), (0.0,) * len(path[0].exit_shares)
    above = kept[0]
    best = path[above]
    if above == 0 or path[above - 1].change.changed <= epsilon:
        return best.layers, best.exit_shares
    below = path[above - 1]
    share = (epsilon - best.change.changed) / (below.change.changed - best.change.changed)
    return best.layers - share * (best.layers - below.layers), best.exit_shares


def rows_of(name: str, variant: str, found: Findings, depth: int, router: float) -> list[Row]:
    rows = []
    for epsilon in EPSILONS:
        layers, shares = at_changed(found.curve, epsilon, depth)
        reached = sum(1.0 - sum(shares[:k]) for k in range(len(shares)))
        rows.append(Row(name, variant, epsilon, layers, depth, shares, found.perfect.layers, router * reached))
    return rows


def measure_model(path: str, dataset: str, options: dict[str, Any], cache: Path, variants: Sequence[str]) -> list[Row]:
    source, tokenizer, name = load_model(path), load_tokenizer(path), Path(path).name
    depth, rows = source.num_layers, list[Row]()
    for variant in variants:
        config = _config(source, dataset, options | VARIANTS[variant])
        try:
            made = calibrate(source, tokenizer, config, cache)
        except CalibrationError as error:  # no token may leave at any checkpoint: all layers, always
            print(f"{name}, {variant}: {error}", file=sys.stderr)
            rows += [Row(name, variant, epsilon, depth, depth, (), depth, 0.0) for epsilon in EPSILONS]
            continue
        assert made is not None
        found = investigate(made.assessment)
        costs = made.assessment.costs
        rows += rows_of(name, variant, found, depth, (costs.router + costs.lens) / costs.layer)
        print(_markdown(rows[-len(EPSILONS) :]), made.routers.sizes(), file=sys.stderr, flush=True)
    return [replace(row, perfect_layers=_perfect(rows, row)) for row in rows]


def _perfect(rows: Sequence[Row], row: Row) -> float:
    """Of the calibrations that leave the same states, lenses or none, the one that kept most checkpoints."""
    lens = "lens" in row.variant
    return min(other.perfect_layers for other in rows if ("lens" in other.variant) == lens)


def _config(source: SourceModel, dataset: str, options: dict[str, Any]) -> TideConfig:
    quarter = max(1, source.num_layers // 4)
    return TideConfig.from_options(
        calibration_dataset=dataset,
        checkpoints=(quarter, 2 * quarter, 3 * quarter),
        min_layers=0,
        test_fraction=0.3,
        **options,
    )


def _markdown(rows: Sequence[Row]) -> str:
    headers = ["model", "calibration", "changed tokens", "layers/token", "saved", "exits", "efficiency", "routers cost"]
    return table(
        headers,
        [
            [
                row.model,
                row.variant,
                f"{100 * row.changed:.0f} %",
                f"{row.layers:.2f} of {row.depth}",
                f"{row.depth - row.layers:.2f} of {row.depth - row.perfect_layers:.2f}",
                " / ".join(f"{100 * share:.0f}" for share in row.exits) + " %" if row.exits else "none",
                f"{100 * row.efficiency:.0f} %",
                f"{row.router_layers:.2f} layers",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dataset", required=True, metavar="SPEC")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument("--variant", action="append", choices=VARIANTS, metavar="NAME", help="one of the six (all)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every calibration")
    options = parser.parse_args()
    given = dict(item.split("=", 1) for item in options.set)
    rows: list[Row] = []
    for path in options.models:
        with tempfile.TemporaryDirectory() as cache:
            variants = options.variant or tuple(VARIANTS)
            rows += measure_model(path, options.dataset, given, Path(cache), variants)
    text = _markdown(rows)
    (options.out / "table.md").write_text(text + "\n")
    (options.out / "table.json").write_text(
        json.dumps([asdict(row) | {"efficiency": row.efficiency} for row in rows], indent=1)
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
