"""Checks the guarantee of thresholds stored by `tune` on text that neither the routers nor `tune` have seen.

    python tools/checks/tuned_thresholds.py BUNDLE --dataset SPEC [--prompts N] [--prompts-per-document N]

The deployed graph is run as `tune` ran it, over prompts of another dataset, and the bundle's own thresholds are
applied: changed tokens at the temperature of `tune` (the mean over prompts is the risk), layers per token, where tokens
exited. Documents that the routers were fitted on or that `tune` drew prompts from are omitted, by the hashes that both
records keep. Exit code 0 when the measured risk is at most the certified epsilon, 1 when it is above, 2 when the bundle
or the text cannot be used.

The measured risk is one sample: just above epsilon is no proof against the promise, nor just below one for it. So the
table also shows the p-value of "the true risk is above epsilon" (one test, independent prompts assumed) and each
document's own risk: where documents differ much, the error between documents is the one to look at.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.common.formatting import table
from tide_export.common.progress import stage
from tide_export.errors import BundleError, TideError
from tide_export.runtime.engine import load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.tuning.guarantee import p_value
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import draw_prompts

SEED = 1 << 32  # of noise that `tune` did not draw


def check(
    bundle: str, dataset: str, *, prompts: int, prompts_per_document: int, threads: int | None = None
) -> dict[str, Any]:
    """Measures the bundle's stored thresholds on `dataset`.

    Returns:
        What `tune` recorded (`certified`) and what was measured: `n` prompts, the `risk` (mean over prompts of the
        share of changed tokens), its standard errors with prompts (`error_prompts`) or documents
        (`error_documents`; None with one) taken for independent, the `p_value` of "the true risk is above epsilon",
        `layers_per_token`, the share of tokens that exited by layers (`exits`), a row for each of the
        `documents` (hash, prompts, risk, layers per token), how many were left out, and whether
        risk <= epsilon (`holds`).

    Raises:
        BundleError: not tuned, the thresholds are not those certified, or the records do not say which documents were
            seen.
        TuneError: fewer than two documents remain unseen.
        DatasetError: as `Documents`.
    """
    engine = load(bundle, provider="cpu", threads=threads)
    manifest = engine.manifest
    record = _tuning(manifest, bundle)
    prompt_length, positions = record["prompt_length"], record["positions"]
    drawn = draw_prompts(
        dataset,
        BundleTokenizer(engine.bundle),
        {"document_hashes": _seen(manifest, bundle)},
        length=prompt_length + positions - 1,
        count=prompts,
        per_document=prompts_per_document,
        seed=0,
    )
    all_prompts = [*drawn.path, *drawn.calibration]  # nothing is chosen here: both parts are for the measuring
    may_exit = [layers for layers in manifest.checkpoints if layers >= manifest.min_layers]
    stored = dict(zip(manifest.checkpoints, manifest.thresholds, strict=True))
    with stage("running the graph", total=len(all_prompts)) as advance:
        measured = measure_prompts(
            engine, all_prompts, prompt_length, may_exit, advance, record.get("temperature", 0.0), SEED
        )
    thresholds = [stored[layers] for layers in may_exit]
    losses, (_, layers) = measured.losses(thresholds), measured.outcome(thresholds)
    risk = float(losses.mean())
    # Any bet that was chosen before these losses were known gives a valid p-value.
    bet = None if positions == 1 and prompts_per_document == 1 else record.get("bet") or 1.0
    owner = np.repeat(np.arange(len(drawn.document_prompts)), drawn.document_prompts)
    return {
        "certified": record,
        "num_layers": manifest.model.num_layers,
        "n": len(all_prompts),
        "left_out": drawn.seen,
        "risk": risk,
        "error_prompts": clustered_error(losses, np.arange(len(losses))),
        "error_documents": clustered_error(losses, owner) if len(drawn.document_hashes) > 1 else None,
        "p_value": p_value(losses, record["epsilon"], bet),
        "layers_per_token": float(layers.mean()),
        "exits": {at: float((layers == at).mean()) for at in (*measured.layers, measured.depth)},
        "documents": [
            (name, int((owner == i).sum()), float(losses[owner == i].mean()), float(layers[owner == i].mean()))
            for i, name in enumerate(drawn.document_hashes)
        ],
        "holds": risk <= record["epsilon"],
    }


def _tuning(manifest: Manifest, bundle: str) -> dict[str, Any]:
    """The record of `tune`, when it is about the thresholds the bundle uses."""
    record = manifest.tuning
    if not record:
        raise BundleError(f"bundle {bundle} was not tuned: there is nothing certified to check")
    if (record["thresholds"], record["min_layers"]) != (list(manifest.thresholds), manifest.min_layers):
        raise BundleError(f"bundle {bundle}: its thresholds are not those that `tune` certified; tune it again")
    return record


def _seen(manifest: Manifest, bundle: str) -> list[str]:
    """Hashes of all documents that the routers or `tune` saw."""
    hashes: list[str] = []
    for who, record in (("calibration", manifest.calibration), ("tuning", manifest.tuning)):
        mine = (record or {}).get("document_hashes")
        if mine is None:
            raise BundleError(
                f"bundle {bundle}: its {who} record does not say which documents were seen, so a held-out set cannot "
                "be told from them; make the bundle again with this release"
            )
        hashes += mine
    return hashes


def clustered_error(losses: np.ndarray, owner: np.ndarray) -> float:
    """Standard error of the mean when the losses of one owner (0, 1, ...) go together; 0 with a single owner."""
    sums = np.bincount(owner, losses - losses.mean())
    n = len(sums)
    return float(np.sqrt((sums**2).sum() * n / max(n - 1, 1)) / len(losses))


def render(result: dict[str, Any]) -> str:
    """Returns the text that the tool prints."""
    certified, documents = result["certified"], result["documents"]
    rows: list[list[object]] = [
        ["prompts", certified["n"], result["n"]],
        ["risk", f"{certified['risk']:.4f}", f"{result['risk']:.4f}"],
        ["  standard error, prompts independent", "", _shown(result["error_prompts"])],
        ["  standard error, documents independent", "", _shown(result["error_documents"])],
        ["p-value", _shown(certified["p_value"]), _shown(result["p_value"])],
        ["layers/token", f"{certified['layers_per_token']:.2f}", f"{result['layers_per_token']:.2f}"],
    ]
    rows += [[f"exited after layer {at}", "", f"{100 * share:.1f} %"] for at, share in result["exits"].items()]
    shown = [[*d[:2], f"{d[2]:.4f}", f"{d[3]:.2f}"] for d in documents]
    return "\n".join(
        [
            f"{result['n']} prompts of {len(documents)} documents, {certified['positions']} positions after "
            f"{certified['prompt_length']} tokens each; left out: {result['left_out']} documents the routers or `tune` "
            f"saw{'' if certified['certified'] else '; nothing was certified: no token exits'}",
            table(["", "certified", "here"], rows),
            table(["document", "prompts", "risk", "layers/token"], shown),
            f"{'HOLDS' if result['holds'] else 'DOES NOT HOLD'}: risk {result['risk']:.4f}, certified epsilon "
            f"{certified['epsilon']:g} (delta {certified['delta']:g}); {result['layers_per_token']:.2f} of "
            f"{result['num_layers']} layers per token",
        ]
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--dataset", required=True, help="text that neither the routers nor `tune` saw (SPEC)")
    parser.add_argument("--prompts", type=_positive, default=600, help="at most (%(default)s)")
    parser.add_argument("--prompts-per-document", type=_positive, default=1, help="at most (%(default)s)")
    parser.add_argument("--threads", type=_positive, help="of ONNX Runtime (one per physical core)")
    parser.add_argument("--json", type=Path, help="file to write the numbers into as well")
    options = vars(parser.parse_args(arguments))
    bundle, dataset, file = options.pop("bundle"), options.pop("dataset"), options.pop("json")
    try:
        result = check(bundle, dataset, **options)
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render(result))
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["holds"] else 1


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
