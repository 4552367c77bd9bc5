"""Do several prompts that are decoded together get what each gets alone? Asked by `validate` and before a bundle is
put in place (`verify.export_gate`).

`validate` has just held the prompts one by one to HuggingFace and the oracle (`parity`), so equal tokens need no other
proof. A sequence that differs is held to the reference itself, at every position after its own prefix: where that is
undecided, sums over other rows may well decide otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_export.bundle.manifest import EXACT
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.decoding.generation import Generation
from tide_export.runtime.engine import Engine
from tide_export.runtime.sequence import Batch
from tide_export.verify.parity import Answers, Check, Written, ask, count_position, full_logits, tally

PROMPTS = 4


@dataclass(frozen=True)
class Together:
    """What became of it on one engine.

    Attributes:
        name: of the engine, empty for the bundle's graph.
        prompts: how many were decoded together; 0 where the bundle holds no networks for that, or there was one prompt.
        checks: a tally for each mode; none where nothing was compared.
        reason: why nothing was.
    """

    name: str
    prompts: int
    checks: list[Check]
    reason: str | None = None

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "prompts": self.prompts,
            "reason": self.reason,
            "holds": self.holds,
            "checks": [check.as_dict() for check in self.checks],
        }

    def lines(self) -> list[str]:
        """A line for the report, and one for each of the first differences."""
        name = f"{self.name}, " if self.name else ""
        if not self.checks:
            return [f"{name}several prompts together: {self.reason}"]
        modes = ", ".join(check.name for check in self.checks)
        tokens, wrong = sum(c.tokens for c in self.checks), sum(c.wrong for c in self.checks)
        forgiven = sum(c.forgiven for c in self.checks)
        found = f"all {tokens} tokens" if not wrong + forgiven else f"{tokens - wrong - forgiven} of {tokens} tokens"
        note = f" ({wrong} wrong, {forgiven} forgiven)" if wrong + forgiven else ""
        return [
            f"{name}{self.prompts} prompts together ({modes}): {found} are those of one by one{note}",
            *(f"  {check.name}: {difference}" for check in self.checks for difference in check.differences),
        ]


def check_together(
    engine: Engine,
    source: SourceModel,
    routers: RouterSet | None,
    prompts: Sequence[Sequence[int]],
    alone: Mapping[str, Check],
    max_pending: int,
    name: str = "",
    advance: Callable[[float], object] = lambda amount: None,
) -> Together:
    """Some of `prompts`, of all lengths, together, against what each of them got alone.

    Args:
        alone: mode -> the check of all `prompts` one by one in it; of `exit` at its thresholds. Their tokens hold.
        name: of the engine, for the report.
        advance: called with 1 after every mode.
    """
    picked = sorted({round(number) for number in np.linspace(0, len(prompts) - 1, PROMPTS)})
    reason = None
    if engine.max_batch_size == 1:
        reason = "not in this bundle, which takes one at a time (its export said why, or --batch-size 1 was given)"
    elif len(picked) == 1:
        reason = "not compared, there is one prompt"
    if reason is not None:
        advance(len(alone))
        return Together(name, 0, [], reason)
    checks = []
    for mode, own in alone.items():
        setting = own.name.removeprefix(f"{name} ")
        called = mode if setting == mode else f"{mode} at {setting}"
        check = Check(called, own.thresholds, tolerance=own.tolerance)
        options = _options(engine, mode, own, max_pending)
        wanted = [own.written[number] for number in picked]
        found = engine.generate(
            [prompts[number] for number in picked], max_new_tokens=len(wanted[0][0]), mode=mode, **options
        )
        for number, one, (tokens, layers) in zip(picked, found, wanted, strict=True):
            check.tokens += len(tokens)
            if one.tokens != tokens or (mode != "lossless" and one.stats.exit_layer != layers):
                _judge(check, mode, one, source, routers, prompts[number], engine.manifest.kv_cache_strategy)
        checks.append(check)
        advance(1)
    return Together(name, len(picked), checks)


def _options(engine: Engine, mode: str, own: Check, max_pending: int) -> dict[str, Any]:
    """How `own` was generated, as `Engine.generate` takes it; lossless mode as the bundle was tuned."""
    options: dict[str, Any] = {"stop_token_ids": []}
    if mode == "exit":
        options |= {"threshold": [min(value, 1.0) for value in own.thresholds], "min_layers": 0}  # no score is above 1
        if engine.manifest.kv_cache_strategy == EXACT:
            options["max_pending"] = max_pending
    return options


def _judge(
    check: Check,
    mode: str,
    found: Generation,
    source: SourceModel,
    routers: RouterSet | None,
    prompt: Sequence[int],
    kv_cache_strategy: str,
) -> None:
    """Adds to `check` where one sequence differs from its reference."""
    layers, forced = found.stats.exit_layer, found.tokens[:-1]
    should, margins = layers, dict[int, np.ndarray]()
    if mode == "exit":
        assert routers is not None
        answers = ask(source, routers, prompt, forced, check.thresholds, kv_cache_strategy)
        reference, should, margins = answers.exits, answers.exit_layers, dict(answers.margins)
    else:
        reference = full_logits(source, [*prompt, *forced], len(prompt) - 1)
    for i, (token, left) in enumerate(zip(found.tokens, layers, strict=True)):
        count_position(check, i, token, left, reference[i], should[i], margins)


def compare_together(batch: Batch, answers: Sequence[Answers], segment_sizes: Sequence[int], check: Check) -> None:
    """Adds to `check` what an empty batch at the thresholds of `answers` says of all their texts at once.

    Args:
        answers: of texts with equally many forced tokens.
        segment_sizes: layers of each segment.
    """
    places = [batch.join() for _ in answers]
    rows = zip(*(one.forced for one in answers), strict=True)
    feeds = [[one.prompt for one in answers], *([[token] for token in row] for row in rows)]
    steps = [batch.step(dict(zip(places, feed, strict=True))) for feed in feeds]
    for place, one in zip(places, answers, strict=True):
        own = [step[place] for step in steps]
        logits = np.stack([result.logits for result in own])
        executed = sum(sum(segment_sizes[: result.segments_run]) for result in own)
        written = Written(logits.argmax(-1).tolist(), logits, [result.exit_layer for result in own], executed)
        tally(check, written, one.exits, one.exit_layers, one.margins)
        check.same_as_full += int((one.full.argmax(-1) == np.array(written.tokens)).sum())
