"""Reports the results of `tune`: as a table, as JSON, and as the manifest's fields."""

from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.manifest import Drafting, Manifest
from tide_export.common.formatting import attributes, in_loops, table
from tide_export.common.version import __version__
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.choose import Tested
from tide_export.tuning.prompts import Prompts
from tide_export.tuning.replay import Replayed, Setting, StepCosts, off
from tide_export.tuning.request import ExitRequest, LosslessRequest

EXIT_METHOD = "learn-then-test, fixed sequence"
LOSSLESS_METHOD = "replay of recorded continuations, checked by interleaved generations"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class ExitReport:
    """Result of `tune` in mode exit.

    Attributes:
        checkpoints: the bundle's checkpoints.
        thresholds: one per checkpoint of the bundle; all 1.0 (nothing exits) if no candidate passed.
        min_layers: the value that was tested and is stored.
        certified: the candidate with these thresholds; None if none passed.
        tested: candidates in the order of the tests; one that failed is the last.
        candidates: number of candidates.
        auto: mode `auto` with these thresholds.
        date: ISO 8601.
    """

    bundle: str
    request: ExitRequest
    prompts: Prompts
    checkpoints: tuple[int, ...]
    num_layers: int
    loops: int
    thresholds: tuple[float, ...]
    min_layers: int
    certified: Tested | None
    tested: list[Tested]
    candidates: int
    auto: AutoMode
    date: str = field(default_factory=_now)

    def stored_in(self, manifest: Manifest) -> Manifest:
        """Returns the manifest of the tuned bundle."""
        record = self.record()
        return replace(manifest, thresholds=self.thresholds, min_layers=self.min_layers, tuning=record, auto=self.auto)

    def record(self) -> dict[str, Any]:
        """Returns the guarantee and all that is needed to reproduce it, as JSON types."""
        best, prompts, request = self.certified, self.prompts, self.request
        return {
            "method": EXIT_METHOD,
            "p_value_kind": "binomial" if request.binary else "betting",
            "certified": best is not None,
            **attributes(
                request,
                "epsilon",
                "delta",
                "perplexity_epsilon",
                "temperature",
                "prompts_per_document",
                "prompt_length",
                "positions",
                "seed",
            ),
            "n": len(prompts.calibration),
            "documents": prompts.calibration_documents,
            "path_prompts": len(prompts.path),
            "path_documents": prompts.path_documents,
            "risk": best.risk if best else 0.0,
            "p_value": best.p_value if best else None,
            "bet": best.bet if best else None,
            "perplexity": best.change.perplexity if best else 0.0,
            "perplexity_error": best.change.perplexity_error if best else 0.0,
            "layers_per_token": best.layers if best else float(self.num_layers),
            "num_layers": self.num_layers,
            "thresholds": list(self.thresholds),
            "min_layers": self.min_layers,
            "candidates": self.candidates,
            "path": [asdict(tested) | {"thresholds": list(tested.thresholds)} for tested in self.tested],
            "dataset": request.dataset,
            "dataset_sha256": prompts.dataset_sha256,
            "document_hashes": prompts.document_hashes,
            "documents_seen_by_routers": prompts.seen,
            "documents_repeated": prompts.duplicates,
            "documents_too_short": prompts.short,
            "overlap_checked": prompts.overlap,
            "tide_export": __version__,
            "date": self.date,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns `record` and the bundle's fields, as JSON types."""
        stored = not self.request.dry_run
        start = {"bundle": self.bundle, "stored": stored, "auto": asdict(self.auto)}
        return start | {"checkpoints": list(self.checkpoints), **self.record()}

    def render(self) -> str:
        """Returns the text that the command prints."""
        prompts, request = self.prompts, self.request
        return "\n".join(
            [
                f"{self.bundle} on {request.dataset}",
                f"{len(prompts.path)} prompts of {prompts.path_documents} documents to choose candidates, "
                f"{len(prompts.calibration)} of {prompts.calibration_documents} others to test them; "
                f"{request.positions} positions after {request.prompt_length} tokens each",
                f"left out: {prompts.seen} documents the routers saw, {prompts.duplicates} repeated, "
                f"{prompts.short} too short (overlap with the routers' text checked: {prompts.overlap})",
                "",
                self._table(),
                "",
                *self._verdict(),
                sentence(self.auto),
                _stored(request.dry_run, "the bundle's own thresholds from now on"),
            ]
        )

    def _table(self) -> str:
        exits = [layers for layers in self.checkpoints if layers >= self.min_layers]
        headers = [
            "candidate",
            *(f"threshold@{layers}" for layers in exits),
            "changed, path",
            "changed",
            "p",
            "perplexity",
            "layers/token",
        ]
        rows = [
            [
                number,
                *map(_threshold, tested.thresholds),
                f"{tested.path_risk:.4f}",
                f"{tested.risk:.4f}",
                f"{tested.p_value:.2g}",
                f"{100 * tested.change.perplexity:+.2f} ± {100 * tested.change.perplexity_error:.2f} %",
                f"{tested.layers:.2f}",
                "passed" if tested.passed else "failed",
            ]
            for number, tested in enumerate(self.tested, 1)
        ]
        return table([*headers, ""], rows)

    def _verdict(self) -> list[str]:
        request, untested = self.request, self.candidates - len(self.tested)
        lines = [f"{untested} more aggressive candidates were not tested"] if untested else []
        if self.certified is None:
            return [
                *lines,
                f"NOT CERTIFIED: no candidate passed at epsilon {request.epsilon:g}, delta {request.delta:g}; every "
                "token takes all layers",
            ]
        change = self.certified.change
        return [
            *lines,
            f"CERTIFIED: thresholds {','.join(f'{value:.6g}' for value in self.thresholds)}",
            f"  changed tokens at temperature {request.temperature:g}: at most {request.epsilon:g} of a prompt's on "
            f"average, with probability {1 - request.delta:g}; measured {self.certified.risk:.4f}",
            f"  perplexity: {100 * change.perplexity:+.2f} ± {100 * change.perplexity_error:.2f} %, at most "
            f"{100 * request.perplexity_epsilon:+g} % asked for",
            f"  layers per token: {self.certified.layers:.2f} of {self.num_layers}"
            f"{in_loops(self.certified.layers, self.num_layers, self.loops)}",
            f"  {self._scope()}",
        ]

    def _scope(self) -> str:
        """Says which prompts the guarantee covers; several of one document do not count as new documents."""
        if self.request.prompts_per_document == 1:
            return "for new documents like those of the dataset: one prompt was taken from each"
        return (
            f"for other places of the {self.prompts.calibration_documents} documents tested, up to "
            f"{self.request.prompts_per_document} prompts from each; for other documents as far as they are like these"
        )


@dataclass(frozen=True)
class Comparison:
    """Result of interleaved generations in full and in lossless mode.

    Attributes:
        speedup: full depth's decoding time over lossless mode's, the median over the prompts; 1.0: not measured.
        drafts: drafted and accepted tokens, by source (as `ExitStats.drafts`).
    """

    speedup: float
    drafts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.drafts.values())

    @property
    def acceptance(self) -> float:
        return _share(sum(accepted for _, accepted in self.drafts.values()), self.drafted)

    def share(self, source: str) -> float:
        """Returns a source's share of all drafts."""
        return _share(self.drafts.get(source, [0])[0], self.drafted)


@dataclass(frozen=True)
class LosslessReport:
    """Result of `tune` in mode lossless.

    Attributes:
        checkpoints: the bundle's checkpoints.
        setting: the best of the replay; all off if none should be faster than full depth.
        costs: seconds of single steps on this machine.
        expected: the replay of `setting`.
        measured: the generations; none were made if no speed-up was expected.
        pays: whether `setting` is stored; else drafting is off.
        auto: mode `auto` with this drafting.
        date: ISO 8601.
    """

    bundle: str
    request: LosslessRequest
    prompts: Prompts
    checkpoints: tuple[int, ...]
    setting: Setting
    costs: StepCosts
    expected: Replayed
    measured: Comparison
    pays: bool
    auto: AutoMode
    date: str = field(default_factory=_now)

    def stored_in(self, manifest: Manifest) -> Manifest:
        """Returns the manifest of the tuned bundle."""
        return replace(manifest, drafting=self.drafting(), auto=self.auto)

    def drafting(self) -> Drafting:
        """Returns the drafting to store."""
        setting = self.setting if self.pays else off(len(self.checkpoints))
        return setting.drafting(self.record())

    def record(self) -> dict[str, Any]:
        """Returns the result and all that is needed to reproduce it, as JSON types."""
        request, setting, expected = self.request, self.setting, self.expected
        accepted = expected.accepted + expected.lookup_accepted
        return {
            "method": LOSSLESS_METHOD,
            "pays": self.pays,
            "speedup": self.measured.speedup,
            "acceptance": self.measured.acceptance,
            "drafts": self.measured.drafts,
            "expected_speedup": setting.speedup,
            "expected_acceptance": _share(accepted, expected.drafted + expected.lookup_drafted),
            "tried_max_drafts": setting.max_drafts,
            "tried_lookup": setting.prompt_lookup,
            "tried_learned": setting.max_learned,
            "draft_seconds": list(self.costs.draft),
            "verify_seconds": {str(n): seconds for n, seconds in self.costs.verify.items()},
            "block_seconds": {str(n): seconds for n, seconds in self.costs.block.items()},
            "full_seconds": self.costs.plain,
            "path_prompts": len(self.prompts.path),
            "n": len(self.prompts.calibration),
            **attributes(request, "prompt_length", "new_tokens", "temperature", "threads", "dataset", "seed"),
            "dataset_sha256": self.prompts.dataset_sha256,
            "tide_export": __version__,
            "date": self.date,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns `record` and the bundle's fields, as JSON types."""
        return {
            "bundle": self.bundle,
            "stored": not self.request.dry_run,
            "auto": asdict(self.auto),
            "checkpoints": list(self.checkpoints),
            "drafting": {key: value for key, value in asdict(self.drafting()).items() if key != "tuning"},
            **self.record(),
        }

    def render(self) -> str:
        """Returns the text that the command prints."""
        record, measured = self.record(), self.measured
        lines = [f"{self.bundle} on {self.request.dataset}", "", self._table(), ""]
        if self.measured.drafted:
            expected = ""
            if self.setting.speedup is not None:
                expected = f"; expected {self.setting.speedup:.2f}x with {record['expected_acceptance']:.0%} accepted"
            lines += [
                f"best setting: {self._setting()}{expected}",
                f"measured on {len(self.prompts.calibration)} other prompts, temperature {self.request.temperature:g}: "
                f"{measured.speedup:.2f}x, "
                f"{measured.acceptance:.0%} of drafts accepted "
                f"({measured.share('drafter'):.0%} of drafts by the drafter, "
                f"{measured.share('lookup'):.0%} by prompt lookup)"
                + (", every token that of full depth" if self.request.temperature == 0 else ""),
            ]
        else:
            lines.append("no setting is expected to be faster than full depth")
        if self.pays:
            lines.append(f"PAYS: lossless mode is {measured.speedup:.2f}x as fast as full depth here")
        else:
            lines.append("DOES NOT PAY: lossless mode stays at full depth")
        lines.append(sentence(self.auto))
        return "\n".join([*lines, _stored(self.request.dry_run, "what lossless mode does from now on")])

    def _table(self) -> str:
        costs = self.costs
        steps = [("full depth", costs.plain)]
        steps += [(f"draft after layer {k}", seconds) for k, seconds in zip(self.checkpoints, costs.draft, strict=True)]
        if self.checkpoints:
            steps += [(f"verifying {n} pending tokens", seconds) for n, seconds in costs.verify.items()]
        steps += [(f"{n} tokens at once", seconds) for n, seconds in costs.block.items()]
        rows = [[name, f"{1e3 * seconds:.3f}", f"{seconds / costs.plain:.2f}x"] for name, seconds in steps]
        return table(["step", "ms", "x full"], rows)

    def _setting(self) -> str:
        setting = self.setting
        exits = f"at most {setting.max_drafts} early exits" if setting.max_drafts else "no early exits"
        if setting.max_learned:
            exits = f"up to {setting.max_learned} drafts of the drafter"
        if not setting.prompt_lookup:
            return f"{exits}, no prompt lookup"
        return f"{exits}, prompt lookup of up to {setting.prompt_lookup} tokens"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _stored(dry_run: bool, result: str) -> str:
    return "dry run: the bundle is unchanged" if dry_run else f"stored: {result}"


def _threshold(value: float) -> str:
    return "off" if value >= MAX_THRESHOLD else f"{value:.4f}"
