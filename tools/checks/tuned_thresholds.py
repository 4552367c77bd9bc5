"""Checks the guarantee of thresholds stored by `tune` on text that neither the routers nor `tune` have seen.

    python tools/checks/tuned_thresholds.py BUNDLE --dataset SPEC [--prompts N] [--prompts-per-document N] [--positions
    N]
        [--json FILE]

The deployed graph is run as `tune` ran it, over prompts of another dataset, and the bundle's own thresholds are
applied: share of positions whose greedy token is not that of full depth (the mean over prompts is the risk), layers per
token, where tokens exited. Documents that the routers were fitted on or that `tune` drew prompts from are omitted, by
the hashes that both records keep. Exit code 0 when the measured risk is at most the certified epsilon, 1 when it is
above, 2 when the bundle or the text cannot be used.

The measured risk is one sample: just above epsilon is no proof against the promise, nor just below one for it. So the
table also shows the p-value of "the true risk is above epsilon" (one test, independent prompts assumed) and each
document's own risk: where documents differ much, the error between documents is the one to look at.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.errors import BundleError, TideError
from tide_export.formatting import table
from tide_export.progress import stage
from tide_export.runtime.engine import load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.tuning.guarantee import p_value
from tide_export.tuning.measure import Measurement, measure_prompts
from tide_export.tuning.prompts import draw_prompts


@dataclass(frozen=True)
class Document:
    """The result for one document's prompts."""

    document_hash: str
    prompts: int
    risk: float
    layers_per_token: float


@dataclass(frozen=True)
class Check:
    """The stored thresholds on the second held-out set.

    Attributes:
        certified_*, thresholds, epsilon, delta: what `tune` stored.
        certified: False where nothing passed, so that nothing exits and no token can differ.
        n: prompts measured.
        left_out: documents the routers or `tune` saw.
        risk: mean over prompts of the share of positions that differ from full depth.
        error_prompts, error_documents: standard errors of `risk`, prompts or documents taken for independent; the
            latter is None with a single document.
        p_value: of "the true risk is above epsilon", prompts taken for independent.
        exits: share of tokens that exited, by layers; the depth included.
        holds: risk <= epsilon.
        seconds: of running the graph.
    """

    bundle: str
    dataset: str
    thresholds: list[float]
    certified: bool
    epsilon: float
    delta: float
    certified_risk: float
    certified_layers_per_token: float
    certified_n: int
    certified_p_value: float | None
    num_layers: int
    n: int
    prompt_length: int
    positions: int
    prompts_per_document: int
    seed: int
    left_out: int
    risk: float
    error_prompts: float
    error_documents: float | None
    p_value: float
    layers_per_token: float
    exits: dict[int, float]
    documents: list[Document]
    holds: bool
    seconds: float


def check(
    bundle: str,
    dataset: str,
    *,
    prompts: int,
    prompts_per_document: int,
    prompt_length: int | None = None,
    positions: int | None = None,
    threads: int | None = None,
    seed: int = 0,
) -> Check:
    """Measures the bundle's stored thresholds on `dataset`.

    Args:
        prompt_length, positions: None: those `tune` certified for.
        Others as `tune`'s.

    Raises:
        BundleError: not tuned, the thresholds are not those certified, or the records do not say which documents were
            seen.
        TuneError: fewer than two documents remain unseen.
        DatasetError: as `Documents`.
    """
    engine = load(bundle, provider="cpu", threads=threads)
    manifest = engine.manifest
    record = _tuning(manifest, bundle)
    prompt_length = prompt_length or record["prompt_length"]
    positions = positions or record["positions"]
    drawn = draw_prompts(
        dataset,
        BundleTokenizer(engine.bundle),
        {"document_hashes": _seen(manifest, bundle)},
        length=prompt_length + positions - 1,
        count=prompts,
        per_document=prompts_per_document,
        seed=seed,
    )
    all_prompts = [*drawn.path, *drawn.calibration]  # nothing is chosen here: both parts are for the measuring
    may_exit = [layers for layers in manifest.checkpoints if layers >= manifest.min_layers]
    stored = dict(zip(manifest.checkpoints, manifest.thresholds, strict=True))
    started = time.perf_counter()
    with stage("running the graph", total=len(all_prompts)) as advance:
        measured = measure_prompts(engine, all_prompts, prompt_length, may_exit, advance)
    seconds = time.perf_counter() - started

    thresholds = [stored[layers] for layers in may_exit]
    losses, (_, layers) = measured.losses(thresholds), measured.outcome(thresholds)
    risk = float(losses.mean())
    # Any bet that was chosen before these losses were known gives a valid p-value.
    bet = None if positions == 1 and prompts_per_document == 1 else record.get("bet") or 1.0
    owner = np.repeat(np.arange(len(drawn.document_prompts)), drawn.document_prompts)
    return Check(
        bundle=bundle,
        dataset=dataset,
        thresholds=list(manifest.thresholds),
        certified=record["certified"],
        epsilon=record["epsilon"],
        delta=record["delta"],
        certified_risk=record["risk"],
        certified_layers_per_token=record["layers_per_token"],
        certified_n=record["n"],
        certified_p_value=record["p_value"],
        num_layers=manifest.model.num_layers,
        n=len(all_prompts),
        prompt_length=prompt_length,
        positions=positions,
        prompts_per_document=prompts_per_document,
        seed=seed,
        left_out=drawn.seen,
        risk=risk,
        error_prompts=_clustered_error(losses, np.arange(len(losses))),
        error_documents=_clustered_error(losses, owner) if len(drawn.document_hashes) > 1 else None,
        p_value=p_value(losses, record["epsilon"], bet),
        layers_per_token=float(layers.mean()),
        exits=_exits(measured, layers),
        documents=[
            Document(name, int((owner == i).sum()), float(losses[owner == i].mean()), float(layers[owner == i].mean()))
            for i, name in enumerate(drawn.document_hashes)
        ],
        holds=risk <= record["epsilon"],
        seconds=seconds,
    )


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


def _clustered_error(losses: np.ndarray, owner: np.ndarray) -> float:
    """Standard error of the mean when the losses of one owner (0, 1, ...) go together; 0 with a single owner."""
    sums = np.bincount(owner, losses - losses.mean())
    n = len(sums)
    return float(np.sqrt((sums**2).sum() * n / max(n - 1, 1)) / len(losses))


def _exits(measured: Measurement, layers: np.ndarray) -> dict[int, float]:
    return {at: float((layers == at).mean()) for at in (*measured.layers, measured.depth)}


def render(result: Check) -> str:
    """The text the tool prints."""
    between = "-" if result.error_documents is None else f"{result.error_documents:.4f}"
    rows: list[list[object]] = [
        ["prompts", result.certified_n, result.n],
        ["risk", f"{result.certified_risk:.4f}", f"{result.risk:.4f}"],
        ["  standard error, prompts independent", "", f"{result.error_prompts:.4f}"],
        ["  standard error, documents independent", "", between],
        ["p-value", _p(result.certified_p_value), _p(result.p_value)],
        ["layers/token", f"{result.certified_layers_per_token:.2f}", f"{result.layers_per_token:.2f}"],
    ]
    for at, share in result.exits.items():
        rows.append([f"exited after layer {at}", "", f"{100 * share:.1f} %"])
    documents = [[d.document_hash, d.prompts, f"{d.risk:.4f}", f"{d.layers_per_token:.2f}"] for d in result.documents]
    verdict = "HOLDS" if result.holds else "DOES NOT HOLD"
    return "\n".join(
        [
            f"{result.bundle} on {result.dataset}",
            f"{result.n} prompts of {len(result.documents)} documents, {result.positions} positions after "
            f"{result.prompt_length} tokens each; left out: {result.left_out} documents the routers or `tune` saw",
            f"thresholds {','.join(f'{value:.6g}' for value in result.thresholds)}"
            + ("" if result.certified else " (nothing was certified: no token exits)"),
            "",
            table(["", "certified", "here"], rows),
            "",
            table(["document", "prompts", "risk", "layers/token"], documents),
            "",
            f"{verdict}: risk {result.risk:.4f}, certified epsilon {result.epsilon:g} (delta {result.delta:g}); "
            f"{result.layers_per_token:.2f} of {result.num_layers} layers per token; {result.seconds:.0f} s",
        ]
    )


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--dataset", required=True, help="text that neither the routers nor `tune` saw (SPEC)")
    parser.add_argument("--prompts", type=_positive, default=600, help="at most (%(default)s)")
    parser.add_argument("--prompts-per-document", type=_positive, default=1, help="at most (%(default)s)")
    parser.add_argument("--prompt-length", type=_positive, help="tokens before the first position (as tuned)")
    parser.add_argument("--positions", type=_positive, help="scored per prompt (as tuned)")
    parser.add_argument("--threads", type=_positive, help="of ONNX Runtime (one per physical core)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of prompts (%(default)s)")
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
        file.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if result.holds else 1


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
