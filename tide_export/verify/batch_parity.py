"""Compares prompts decoded in one batch with the same prompts decoded one by one.

`parity` has compared the prompts one by one with the references, so equal tokens prove the batch. A sequence that
differs is compared with its reference at every position of its own text: where the reference is undecided, the rounding
of a batch may decide otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tide_export.common.formatting import attributes
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine
from tide_export.runtime.generation import Generation
from tide_export.runtime.stepping import Batch
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.verify.parity import Check, Generated
from tide_export.verify.references import References, exit_references, full_reference

PROMPTS = 4


@dataclass(frozen=True)
class BatchCheck:
    """Result of the comparison on one engine.

    Attributes:
        engine: its name in the report, empty for the bundle's graph.
        prompts: number of prompts in the batch; 0: nothing was compared.
        checks: one per mode; empty: nothing was compared.
        reason: why nothing was compared.
    """

    engine: str
    prompts: int
    checks: list[Check]
    reason: str | None = None

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        checks = [check.as_dict() for check in self.checks]
        return attributes(self, "engine", "prompts", "reason", "holds") | {"checks": checks}

    def lines(self) -> list[str]:
        """Returns a line for the report, and one for each of the first differences."""
        engine = f"{self.engine}, " if self.engine else ""
        if not self.checks:
            return [f"{engine}several prompts in a batch: {self.reason}"]
        modes = ", ".join(check.name for check in self.checks)
        tokens, wrong = sum(c.tokens for c in self.checks), sum(c.wrong for c in self.checks)
        tolerated = sum(c.within_tolerance for c in self.checks)
        equal, note = f"all {tokens} tokens", ""
        if wrong + tolerated:
            equal = f"{tokens - wrong - tolerated} of {tokens} tokens"
            note = f" ({wrong} wrong, {tolerated} within tolerance)"
        return [
            f"{engine}{self.prompts} prompts in a batch ({modes}): {equal} equal those of one by one{note}",
            *(f"  {check.name}: {difference}" for check in self.checks for difference in check.differences),
        ]


def check_batch(
    engine: Engine,
    source: SourceModel,
    routers: RouterSet | None,
    prompts: Sequence[Sequence[int]],
    single: Mapping[str, Check],
    max_pending: int,
    name: str = "",
    advance: Callable[[float], object] = lambda amount: None,
) -> BatchCheck:
    """Decodes prompts of different lengths in one batch, and compares them with those decoded alone.

    Args:
        single: name in the report -> a check of all `prompts` one by one that holds.
        name: the engine's name in the report.
        advance: called with 1 after every mode.
    """
    picked = sorted({round(number) for number in np.linspace(0, len(prompts) - 1, PROMPTS)})
    reason = None
    if engine.max_batch_size == 1:
        reason = "not in this bundle, which takes one at a time (its export said why, or --batch-size 1 was given)"
    elif len(picked) == 1:
        reason = "not compared, there is one prompt"
    if reason is not None:
        advance(len(single))
        return BatchCheck(name, 0, [], reason)
    checks = []
    for title, reference in single.items():
        check = Check(title, reference.mode, reference.thresholds, reference.tolerance)
        expected = [reference.generated[number] for number in picked]
        batch = engine.generate(
            [prompts[number] for number in picked],
            max_new_tokens=len(expected[0].tokens),
            mode=check.mode,
            **_options(check, max_pending),
        )
        for number, generation, alone in zip(picked, batch, expected, strict=True):
            check.tokens += len(alone.tokens)
            equal = check.mode == "lossless" or generation.stats.exit_layer == alone.exit_layers
            if generation.tokens != alone.tokens or not equal:
                _compare(check, generation, source, routers, prompts[number])
        checks.append(check)
        advance(1)
    return BatchCheck(name, len(picked), checks)


def _options(check: Check, max_pending: int) -> dict[str, Any]:
    """Returns the options of `Engine.generate` for the check; lossless mode as the bundle was tuned."""
    options: dict[str, Any] = {"stop_token_ids": []}
    if check.mode == "exit":
        thresholds = [min(value, MAX_THRESHOLD) for value in check.thresholds]
        options |= {"threshold": thresholds, "min_layers": 0, "max_pending": max_pending}
    return options


def _compare(
    check: Check,
    generation: Generation,
    source: SourceModel,
    routers: RouterSet | None,
    prompt: Sequence[int],
) -> None:
    """Adds the differences between one sequence and its reference to `check`."""
    text, layers = [*prompt, *generation.tokens[:-1]], generation.stats.exit_layer
    if check.mode == "exit" and routers is not None:
        _, expected = exit_references(source, routers, text, len(prompt), check.thresholds)
    else:
        expected = replace(full_reference(source, text, len(prompt)), exit_layers=layers)
    for i, (token, exit_layer) in enumerate(zip(generation.tokens, layers, strict=True)):
        check.compare_position(i, token, exit_layer, expected)


def compare_batch(
    batch: Batch, max_pending: int, references: Sequence[References], segment_sizes: Sequence[int], check: Check
) -> None:
    """Runs the texts of `references` in an empty batch and adds the output to `check`.

    Args:
        max_pending: the limit of each sequence.
        references: texts with equally many forced tokens, all at the same thresholds.
        segment_sizes: layers of each segment.
    """
    slots = [batch.join(reference.thresholds, max_pending) for reference in references]
    forced = zip(*(reference.forced for reference in references), strict=True)
    inputs = [[reference.prompt for reference in references], *([[token] for token in tokens] for tokens in forced)]
    steps = [batch.step(dict(zip(slots, new, strict=True))) for new in inputs]
    for slot, reference in zip(slots, references, strict=True):
        results = [step[slot] for step in steps]
        logits = np.stack([result.logits for result in results])
        layers = sum(sum(segment_sizes[: result.segments_run]) for result in results)
        tokens, exit_layers = logits.argmax(-1).tolist(), [result.exit_layer for result in results]
        check.add(Generated(tokens, exit_layers, layers, logits), reference.exits, reference.full.logits)
