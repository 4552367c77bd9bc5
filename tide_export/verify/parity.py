"""Compares an engine with its references token for token, on prompts given as token ids.

The engine generates greedily; then the *reference* reads the generated text in one eager PyTorch pass and predicts
every generated position from the same prefix. In full mode the reference is the Hugging Face model, and by induction
equality at every position is equality with its greedy generation. In exit mode it is the oracle (`oracle.py`), which
must agree on the token and on the exit layer. A difference is within tolerance if the reference was undecided: the two
tokens' logits, or the deciding score and its threshold, differ by less than `Tolerance.undecided_gap`. Every such
difference is counted and shown.

If the model and the engine do not fit in memory together, the references are computed first, on a fixed text
(`references.compute_references`), and the engine reads that text later (`compare`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.common.formatting import attributes
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.references import Expected, References, exit_references, full_reference


class Tolerance(NamedTuple):
    """Limits of the rounding errors of an engine."""

    undecided_gap: float  # a smaller difference of two logits, or of score and threshold, leaves it undecided
    relative_error: float  # largest error of a logit relative to the largest logit; a lost parameter causes more
    undecided_share: float = 0.0  # of the largest logit: a smaller difference of two logits leaves it undecided too


# By the precision of an engine's weights and states. In float32, sums in another order differ by about 1e-6.
# Runtime and reference round int8 K/V alike, except where such a difference crosses the middle between two integers.
# Integer matmuls ("int8 matmuls") round their inputs to 8 bits per block: logits of SmolLM2-135M, which reach 35 at
# full depth and 97 at exits, are off by up to 5 %. Rounding the reference alike does not help, because the first value
# that falls to another integer makes others do so. FP8 matmuls keep 4 bits.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-3),
    "fp16": Tolerance(0.05, 0.02),
    "bf16": Tolerance(0.4, 0.1),
    "int8 K/V": Tolerance(0.02, 0.01),
    "int8 matmuls": Tolerance(0.25, 0.2, 0.03),
    "fp8": Tolerance(0.8, 0.2),
}
UNDECIDED_GAP = TOLERANCES["fp32"].undecided_gap
SHOWN_DIFFERENCES = 5


class Stepped(Protocol):
    """Steps sequences by hand: an `Engine` or a `step_graph.StepGraph`."""

    @property
    def manifest(self) -> Manifest: ...

    def start(self, thresholds: Sequence[float], max_pending: int) -> Any: ...


class EngineUnderTest(NamedTuple):
    """An engine to compare with its references.

    Attributes:
        name: its name in the report; empty for the bundle's unchanged graph.
        tolerance: that of its precision.
        as_deployed: False if it computes in a higher precision than the bundle.
    """

    name: str
    engine: Engine
    tolerance: Tolerance
    as_deployed: bool = True


@dataclass(frozen=True)
class Generated:
    """Output of an engine after one prompt.

    Attributes:
        tokens: N token ids.
        exit_layers: N numbers of layers before the exit.
        layers_executed: decoder layers run over all steps; a run over several pending tokens counts once.
        logits: [N, V] float32, those of each token; None in lossless mode.
    """

    tokens: list[int]
    exit_layers: list[int]
    layers_executed: int
    logits: np.ndarray | None = None


@dataclass
class Check:
    """Result of one setting (full depth, one threshold, lossless mode) over all prompts.

    Attributes:
        name: its name in the report, after the engine's: `full`, `0.85`, or `bundle` for the bundle's thresholds.
        mode: `full`, `exit` or `lossless`.
        thresholds: one per checkpoint (2.0: never exit).
        tolerance: that of the engine's precision.
        tokens: generated positions compared.
        wrong: positions that differ from the reference by more than the tolerance.
        within_tolerance: positions that differ where the reference was undecided.
        same_as_full: positions whose token is the full model's choice after the same prefix.
        max_error: largest |logit - reference logit| over positions that exited after the same layer.
        largest_logit: largest |reference logit|, to which `max_error` is relative.
        exits: layers -> positions that exited there (the model's depth: no exit).
        layers_executed: sum of `Generated.layers_executed`; divided by `tokens` it is the cost of a token.
        differences: the first few wrong positions, one sentence each.
        drafted, accepted: drafts of lossless mode.
        generated: the output for each prompt.
    """

    name: str
    mode: str
    thresholds: list[float]
    tolerance: Tolerance = TOLERANCES["fp32"]
    tokens: int = 0
    wrong: int = 0
    within_tolerance: int = 0
    same_as_full: int = 0
    max_error: float = 0.0
    largest_logit: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)
    layers_executed: int = 0
    differences: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    generated: list[Generated] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether tokens were compared, none of them nor an exit layer is wrong, and the logits are equal."""
        return self.tokens > 0 and self.wrong == 0 and self.logits_equal

    @property
    def logits_equal(self) -> bool:
        """Whether all logits are finite and within tolerance; equal tokens alone may hide errors."""
        return (
            bool(np.isfinite(self.max_error)) and self.max_error <= self.tolerance.relative_error * self.largest_logit
        )

    def add(self, generated: Generated, expected: Expected, full_logits: np.ndarray) -> None:
        """Adds one prompt's N positions; `full_logits` [N, V] are the full model's after the same prefixes."""
        for i, (token, layers) in enumerate(zip(generated.tokens, generated.exit_layers, strict=True)):
            if self.compare_position(i, token, layers, expected) and generated.logits is not None:
                error = float(np.abs(generated.logits[i] - expected.logits[i]).max())
                self.max_error = float(np.maximum(self.max_error, error))  # unlike max(), keeps a NaN
                self.largest_logit = max(self.largest_logit, float(np.abs(expected.logits[i]).max()))
        self.tokens += len(generated.tokens)
        self.same_as_full += int((full_logits.argmax(-1) == np.array(generated.tokens)).sum())
        self.exits.update(generated.exit_layers)
        self.layers_executed += generated.layers_executed
        self.generated.append(generated)

    def compare_position(self, i: int, token: int, layers: int, expected: Expected) -> bool:
        """Counts position `i` if it differs; returns whether its exit layer equals `layers`."""
        if layers != expected.exit_layers[i]:
            # At the shallower of the two layers, one exited and the other continued.
            margin = expected.margins.get(min(layers, expected.exit_layers[i]))
            gap = float("inf") if margin is None else float(margin[i])
            undecided = self.tolerance.undecided_gap
            what = f"new token {i + 1} exited after layer {layers} instead of {expected.exit_layers[i]}"
            self._count(gap, undecided, what)
            return False
        best = int(expected.logits[i].argmax())
        if token != best:
            gap = float(expected.logits[i, best] - expected.logits[i, token])
            share = self.tolerance.undecided_share * float(np.abs(expected.logits[i]).max())
            undecided = max(self.tolerance.undecided_gap, share)
            self._count(gap, undecided, f"new token {i + 1} is {token} instead of {best}")
        return True

    def _count(self, gap: float, undecided: float, difference: str) -> None:
        """Counts a difference; it is within tolerance if the reference decided by less than `undecided`."""
        if gap < undecided:
            self.within_tolerance += 1
            return
        self.wrong += 1
        if len(self.differences) < SHOWN_DIFFERENCES:
            self.differences.append(f"{difference} (reference decided by {gap:.2g})")

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as JSON types."""
        counts = ("tokens", "wrong", "same_as_full", "largest_logit", "differences", "drafted", "accepted")
        return attributes(self, "name", "thresholds", "holds", *counts) | {
            "within_tolerance": self.within_tolerance,
            "max_logit_error": self.max_error if np.isfinite(self.max_error) else None,
            "exits_per_layer": {str(layers): count for layers, count in sorted(self.exits.items())},
            "layers_per_token": self.layers_executed / self.tokens if self.tokens else None,
        }


def check_full(
    engine: Stepped,
    source: SourceModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    max_pending: int = 16,
    name: str = "full",
    advance: Callable[[float], object] = lambda amount: None,
    tolerance: Tolerance = TOLERANCES["fp32"],
) -> Check:
    """Compares greedy tokens at full depth with the Hugging Face model.

    Args:
        prompts: `new_tokens` tokens are generated after each.
        name: the setting's name in the report.
        advance: called with 1 after every prompt.
        tolerance: that of the engine's precision.
    """
    check = Check(name, "full", [NEVER_EXIT] * len(engine.manifest.checkpoints), tolerance)
    for prompt in prompts:
        generated = generate_greedily(engine, prompt, new_tokens, check.thresholds, max_pending)
        full = full_reference(source, [*prompt, *generated.tokens[:-1]], len(prompt))
        check.add(generated, full, full.logits)
        advance(1)
    return check


def check_exit(
    engine: Stepped,
    source: SourceModel,
    routers: RouterSet,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    thresholds: Sequence[float],
    max_pending: int = 16,
    name: str = "exit",
    advance: Callable[[float], object] = lambda amount: None,
    tolerance: Tolerance = TOLERANCES["fp32"],
) -> Check:
    """Compares tokens and exit layers with the oracle's; other arguments as in `check_full`.

    Args:
        thresholds: one per checkpoint (2.0: never exit).
    """
    check = Check(name, "exit", list(thresholds), tolerance)
    for prompt in prompts:
        generated = generate_greedily(engine, prompt, new_tokens, thresholds, max_pending)
        text = [*prompt, *generated.tokens[:-1]]
        full, exits = exit_references(source, routers, text, len(prompt), thresholds)
        check.add(generated, exits, full.logits)
        advance(1)
    return check


def check_lossless(
    engine: Engine,
    source: SourceModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    threshold: float | None = None,
    max_pending: int | None = None,
    advance: Callable[[float], object] = lambda amount: None,
    tolerance: Tolerance = TOLERANCES["fp32"],
    name: str = "lossless",
) -> Check:
    """Compares the tokens of lossless mode with the Hugging Face model's.

    An exit in the result is an accepted draft, by the layers before it (0: prompt lookup). Other arguments as in
    `check_full`.

    Args:
        threshold, max_pending: when to draft and the most drafts; None: as the bundle was tuned.
    """
    thresholds = [] if threshold is None else [threshold] * len(engine.manifest.checkpoints)
    check = Check(name, "lossless", thresholds, tolerance)
    for prompt in prompts:
        out = engine.generate(
            prompt,
            max_new_tokens=new_tokens,
            mode="lossless",
            threshold=threshold,
            max_pending=max_pending,
            stop_token_ids=[],
        )
        full = full_reference(source, [*prompt, *out.tokens[:-1]], len(prompt))
        generated = Generated(out.tokens, out.stats.exit_layer, sum(out.stats.layers_run))
        check.add(generated, replace(full, exit_layers=generated.exit_layers), full.logits)
        check.drafted += out.stats.drafted
        check.accepted += out.stats.accepted
        advance(1)
    return check


def compare(engine: Stepped, references: References, max_pending: int, check: Check) -> None:
    """Runs the engine on the text of `references` at the check's thresholds; adds the output to `check`."""
    count = len(references.forced) + 1
    generated = generate_greedily(engine, references.prompt, count, check.thresholds, max_pending, references.forced)
    check.add(generated, references.exits if check.mode == "exit" else references.full, references.full.logits)


def generate_greedily(
    engine: Stepped,
    prompt: Sequence[int],
    new_tokens: int,
    thresholds: Sequence[float],
    max_pending: int,
    forced: Sequence[int] | None = None,
) -> Generated:
    """Generates `new_tokens` greedy tokens after `prompt`; an end-of-sequence token does not stop it.

    Args:
        forced: N - 1 tokens that it reads in place of those it generates.
    """
    sizes = engine.manifest.segment_sizes
    state = engine.start(thresholds=list(thresholds), max_pending=max_pending)
    tokens: list[int] = []
    logits, exit_layers, layers_executed = [], [], 0
    new = list(prompt)
    for i in range(new_tokens):
        step = state.step(new)
        tokens.append(int(step.logits.argmax()))
        new = tokens[-1:] if forced is None else list(forced[i : i + 1])
        logits.append(np.array(step.logits, dtype=np.float32))  # a copy: the engine may reuse its buffer
        exit_layers.append(int(step.exit_layer))
        layers_executed += sum(sizes[: int(step.segments_run)])
    return Generated(tokens, exit_layers, layers_executed, np.stack(logits))
