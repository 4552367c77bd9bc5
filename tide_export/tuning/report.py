"""What `tune` found: a table for people, JSON for programs, and the record that stays in the bundle's manifest."""

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from tide_export.formatting import table
from tide_export.tuning.choose import Tested
from tide_export.tuning.prompts import Prompts
from tide_export.version import __version__

METHOD = "learn-then-test, fixed sequence"


@dataclass(frozen=True)
class TuningReport:
    """The outcome of one `tune`.

    Attributes:
        thresholds: one per checkpoint of the bundle; all 1.0 (nothing exits) when nothing passed.
        p_value_kind: "binomial" or "hoeffding-bentkus".
        min_layers: under which they were tested, and with which they are stored.
        certified: the candidate they come from; None when none passed.
        tested: candidates in the order they were tested, the one that failed (if any) last.
        candidates: how many there were.
        stored: whether the bundle uses them from now on (not after a dry run).
        date: when it was done.
    """

    bundle: str
    dataset: str
    epsilon: float
    delta: float
    prompts: Prompts
    prompts_per_document: int
    prompt_length: int
    positions: int
    p_value_kind: str
    seed: int
    checkpoints: tuple[int, ...]
    num_layers: int
    thresholds: tuple[float, ...]
    min_layers: int
    certified: Tested | None
    tested: list[Tested]
    candidates: int
    stored: bool
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def record(self) -> dict[str, Any]:
        """What the manifest keeps: JSON types, everything needed to say what was promised and to do it again."""
        best, prompts = self.certified, self.prompts
        return {
            "method": METHOD,
            "p_value_kind": self.p_value_kind,
            "certified": best is not None,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "n": len(prompts.calibration),
            "documents": prompts.calibration_documents,
            "path_prompts": len(prompts.path),
            "path_documents": prompts.path_documents,
            "prompts_per_document": self.prompts_per_document,
            "prompt_length": self.prompt_length,
            "positions": self.positions,
            "risk": best.risk if best else 0.0,
            "p_value": best.p_value if best else None,
            "layers_per_token": best.layers if best else float(self.num_layers),
            "num_layers": self.num_layers,
            "thresholds": list(self.thresholds),
            "min_layers": self.min_layers,
            "candidates": self.candidates,
            "path": [asdict(tested) | {"thresholds": list(tested.thresholds)} for tested in self.tested],
            "dataset": self.dataset,
            "dataset_sha256": prompts.dataset_sha256,
            "document_hashes": prompts.document_hashes,
            "documents_seen_by_routers": prompts.seen,
            "documents_repeated": prompts.duplicates,
            "documents_too_short": prompts.short,
            "overlap_checked": prompts.overlap,
            "seed": self.seed,
            "tide_export": __version__,
            "date": self.date,
        }

    def as_dict(self) -> dict[str, Any]:
        """`record`, and what it was done to."""
        return {"bundle": self.bundle, "stored": self.stored, "checkpoints": list(self.checkpoints), **self.record()}

    def render(self) -> str:
        """The text the command prints."""
        prompts = self.prompts
        return "\n".join(
            [
                f"{self.bundle} on {self.dataset}",
                f"{len(prompts.path)} prompts of {prompts.path_documents} documents to choose candidates, "
                f"{len(prompts.calibration)} of {prompts.calibration_documents} others to test them; "
                f"{self.positions} positions after {self.prompt_length} tokens each",
                f"left out: {prompts.seen} documents the routers saw, {prompts.duplicates} repeated, "
                f"{prompts.short} too short (overlap with the routers' text checked: {prompts.overlap})",
                "",
                self._table(),
                "",
                *self._verdict(),
            ]
        )

    def _table(self) -> str:
        exits = [layers for layers in self.checkpoints if layers >= self.min_layers]
        headers = ["candidate", *(f"threshold@{layers}" for layers in exits), "path risk", "risk", "p", "layers/token"]
        rows = [
            [
                number,
                *("off" if value >= 1 else f"{value:.4f}" for value in tested.thresholds),
                f"{tested.path_risk:.4f}",
                f"{tested.risk:.4f}",
                f"{tested.p_value:.2g}",
                f"{tested.layers:.2f}",
                "passed" if tested.passed else "failed",
            ]
            for number, tested in enumerate(self.tested, 1)
        ]
        return table([*headers, ""], rows)

    def _verdict(self) -> list[str]:
        untested = self.candidates - len(self.tested)
        lines = [f"{untested} more aggressive candidates were not tested"] if untested else []
        values = ",".join(f"{value:.6g}" for value in self.thresholds)
        if self.certified:
            lines += [
                f"CERTIFIED: thresholds {values}",
                f"  tokens that differ from full depth: at most {self.epsilon:g} of a prompt's on average, with "
                f"probability {1 - self.delta:g}; measured {self.certified.risk:.4f}",
                f"  layers per token: {self.certified.layers:.2f} of {self.num_layers}",
                f"  {self._about()}",
            ]
        else:
            lines.append(
                f"NOT CERTIFIED: no candidate passed at epsilon {self.epsilon:g}, delta {self.delta:g}; every token "
                "takes all layers"
            )
        done = "stored: the bundle's own thresholds from now on" if self.stored else "dry run: the bundle is unchanged"
        return [*lines, done]

    def _about(self) -> str:
        """Which prompts the guarantee is for; more than one from a document do not count as new documents."""
        if self.prompts_per_document == 1:
            return "for new documents like those of the dataset: one prompt was taken from each"
        return (
            f"for other places of the {self.prompts.calibration_documents} documents tested, up to "
            f"{self.prompts_per_document} prompts from each; for other documents as far as they are like these"
        )
