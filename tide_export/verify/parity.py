"""Token-for-token comparison of an engine with its references, on prompts given as token ids.

The engine generates greedily; then the *reference* reads what it wrote in one eager PyTorch pass and is asked, at every
generated position, what it would have said after the very same prefix. In full mode the reference is the HuggingFace
model, and by induction equality at every position is equality with HuggingFace's own greedy generation. In exit mode it
is the oracle (`oracle.py`), which must agree on the token and on the layer it left at. One floating-point allowance: a
difference is forgiven where the reference itself was undecided, that is, where the two tokens' logits, or the score and
the threshold that decided, lie closer than `Tolerance.forgiven_gap`; every forgiven difference is counted and shown.

Called by `validate` and by the parity tests, with any engine and source model. Where the model and the engine cannot be
in memory at the same time, the references are asked first, about a text of our own choosing (`ask`), and the engine
reads the same text later (`compare`): it is compared after every prefix all the same.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tide_export.bundle.manifest import PROPAGATE
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.oracle import oracle


class Tolerance(NamedTuple):
    """What rounding may do to an engine's numbers."""

    forgiven_gap: float  # between two logits, or a score and a threshold: closer, and the reference was undecided
    relative_error: float  # of a logit, as a share of the largest; a lost parameter comes to more


# By the precision of an engine's weights and states. In float32 sums in another order come to about 1e-6.
# Products of integers ("int8 products") round their inputs to 8 bits, block by block.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-3),
    "fp16": Tolerance(0.05, 0.02),
    "bf16": Tolerance(0.4, 0.1),
    "int8 products": Tolerance(0.25, 0.2),
}
FORGIVEN_GAP = TOLERANCES["fp32"].forgiven_gap
SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class Written:
    """What the engine wrote after one prompt: N tokens, and how it came to each.

    Attributes:
        tokens: N token ids.
        logits: [N, V] float32, those each token was taken from.
        exit_layers: N layer counts, where the hidden state behind each token left.
        layers_executed: decoder layers the engine ran over all steps; one run over several waiting tokens counts once.
    """

    tokens: list[int]
    logits: np.ndarray
    exit_layers: list[int]
    layers_executed: int


@dataclass
class Check:
    """The tally of one setting (full depth, or one threshold) over all prompts.

    Attributes:
        name: `full`, `0.85`, or `bundle` for the bundle's own thresholds; of segment networks `segments full` and so
        on. thresholds: what the graph was given, one per checkpoint (2.0 = off). tokens: generated positions compared.
        wrong: positions where the engine differs from its reference, not forgiven. forgiven: positions where it differs
        and the reference was undecided. same_as_full: positions where the token is the full model's own choice after
        the same prefix. max_error: largest |logit - reference logit| over positions that left at the same layer.
        largest_logit: largest |reference logit|, what `max_error` is measured against. exits: layers -> positions that
        left there (the model's depth: never left). layers_executed: see `Written`; divided by `tokens` it is what a
        token cost. differences: the first few wrong positions, one sentence each. tolerance: what is forgiven. drafted,
        accepted: in lossless mode, drafts made and drafts that stood. written: of each prompt, the tokens and the
        layers they left after.
    """

    name: str
    thresholds: list[float]
    tokens: int = 0
    wrong: int = 0
    forgiven: int = 0
    same_as_full: int = 0
    max_error: float = 0.0
    largest_logit: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)
    layers_executed: int = 0
    differences: list[str] = field(default_factory=list)
    tolerance: Tolerance = TOLERANCES["fp32"]
    drafted: int = 0
    accepted: int = 0
    written: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether something was compared, no token or layer differed, and the logits are the reference's too."""
        return self.tokens > 0 and self.wrong == 0 and self.logits_equal

    @property
    def logits_equal(self) -> bool:
        """Whether all logits are numbers and as near the reference's as rounding allows: tokens alone hide much."""
        return (
            bool(np.isfinite(self.max_error)) and self.max_error <= self.tolerance.relative_error * self.largest_logit
        )

    def as_dict(self) -> dict[str, Any]:
        """The tally, ready for JSON."""
        return {
            "name": self.name,
            "thresholds": self.thresholds,
            "holds": self.holds,
            "tokens": self.tokens,
            "wrong": self.wrong,
            "forgiven": self.forgiven,
            "same_as_full": self.same_as_full,
            "max_logit_error": self.max_error if np.isfinite(self.max_error) else None,
            "largest_logit": self.largest_logit,
            "exits_per_layer": {str(layers): count for layers, count in sorted(self.exits.items())},
            "layers_per_token": self.layers_executed / self.tokens if self.tokens else None,
            "differences": self.differences,
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


@dataclass(frozen=True)
class Answers:
    """What the references say after N prefixes of one text, each a token longer than the one before.

    Attributes:
        prompt: the first prefix.
        forced: the N - 1 tokens behind it.
        full: [N, V] float32, the HuggingFace model's logits.
        exits: [N, V] float32, the oracle's, at `thresholds`, one per checkpoint.
        exit_layers: N layer counts, where the oracle left.
        margins: layers at a checkpoint -> [N], |score - threshold| there.
    """

    prompt: list[int]
    forced: list[int]
    thresholds: list[float]
    full: np.ndarray
    exits: np.ndarray
    exit_layers: list[int]
    margins: dict[int, np.ndarray]


def ask(
    source: SourceModel,
    routers: RouterSet,
    prompt: Sequence[int],
    forced: Sequence[int],
    thresholds: Sequence[float],
    kv_cache_strategy: str,
) -> Answers:
    """The references' answers after `prompt` and after each of the `forced` tokens behind it; needs no engine."""
    propagated = _propagated(kv_cache_strategy, prompt)
    full, judged = _judge(source, routers, [*prompt, *forced], len(prompt) - 1, thresholds, propagated)
    return Answers(list(prompt), list(forced), list(thresholds), full, *judged)


def compare(engine: Engine, answers: Answers, exits: bool, max_pending: int, check: Check) -> None:
    """Adds to `check` what the engine says of the text of `answers`, at full depth or, with `exits`, at their
    thresholds."""
    count = len(answers.forced) + 1
    thresholds = answers.thresholds if exits else [NEVER_EXIT] * len(answers.thresholds)
    written = write_greedily(engine, answers.prompt, count, thresholds, max_pending, answers.forced)
    if exits:
        tally(check, written, answers.exits, answers.exit_layers, answers.margins)
    else:
        tally(check, written, answers.full, [engine.manifest.model.num_layers] * count, {})
    check.same_as_full += int((answers.full.argmax(-1) == np.array(written.tokens)).sum())


def check_full(
    engine: Engine,
    source: SourceModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    max_pending: int = 16,
    name: str = "full",
    advance: Callable[[float], object] = lambda amount: None,
    tolerance: Tolerance = TOLERANCES["fp32"],
) -> Check:
    """The engine at full depth against the HuggingFace model, `new_tokens` greedy tokens after each of `prompts`.

    Args:
        name: what the report calls this setting.
        advance: called with 1 after every prompt.
        tolerance: of the engine's precision.
    """
    check = Check(name, [NEVER_EXIT] * len(engine.manifest.checkpoints), tolerance=tolerance)
    for prompt in prompts:
        written = write_greedily(engine, prompt, new_tokens, check.thresholds, max_pending)
        reference = full_logits(source, [*prompt, *written.tokens[:-1]], len(prompt) - 1)
        tally(check, written, reference, [source.num_layers] * new_tokens, {})
        check.same_as_full += int((reference.argmax(-1) == np.array(written.tokens)).sum())
        advance(1)
    return check


def check_exit(
    engine: Engine,
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
    """The engine with exits against the oracle: the same tokens from the same layers.

    Args:
        thresholds: one per checkpoint, 2.0 = off.
        name: what the report calls this setting.
        advance: called with 1 after every prompt.
        tolerance: of the engine's precision.
    """
    check = Check(name, list(thresholds), tolerance=tolerance)
    for prompt in prompts:
        written = write_greedily(engine, prompt, new_tokens, thresholds, max_pending)
        text, first = [*prompt, *written.tokens[:-1]], len(prompt) - 1
        propagated = _propagated(engine.manifest.kv_cache_strategy, prompt)
        full, judged = _judge(source, routers, text, first, thresholds, propagated)
        tally(check, written, *judged)
        check.same_as_full += int((full.argmax(-1) == np.array(written.tokens)).sum())
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
    """What lossless mode hands out against the HuggingFace model: tokens alone, verified ones have no logits of theirs.

    In the tally an exit is a draft that stood, by the layer it was drafted after (0: found in earlier text).

    Args:
        threshold, max_pending: when drafts are made and how many; None: as the bundle was tuned.
        advance: called with 1 after every prompt.
        tolerance: of the engine's precision.
        name: what the report calls this setting.
    """
    thresholds = [] if threshold is None else [threshold] * len(engine.manifest.checkpoints)
    check = Check(name, thresholds, tolerance=tolerance)
    for prompt in prompts:
        out = engine.generate(
            prompt,
            max_new_tokens=new_tokens,
            mode="lossless",
            threshold=threshold,
            max_pending=max_pending,
            stop_token_ids=[],
        )
        full = full_logits(source, [*prompt, *out.tokens[:-1]], len(prompt) - 1)
        for i, (token, left) in enumerate(zip(out.tokens, out.stats.exit_layer, strict=True)):
            count_position(check, i, token, left, full[i], left, {})
        check.tokens += len(out.tokens)
        check.same_as_full += int((full.argmax(-1) == np.array(out.tokens)).sum())
        check.exits.update(out.stats.exit_layer)
        check.written.append((out.tokens, out.stats.exit_layer))
        check.layers_executed += sum(out.stats.layers_run)
        check.drafted += out.stats.drafted
        check.accepted += out.stats.accepted
        advance(1)
    return check


def write_greedily(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    thresholds: Sequence[float],
    max_pending: int,
    forced: Sequence[int] | None = None,
) -> Written:
    """`new_tokens` greedy tokens after `prompt`; an end-of-sequence token does not stop it: more is compared so.

    Args:
        forced: tokens, one fewer, that it reads in place of those it wrote.
    """
    sizes = engine.manifest.segment_sizes
    state = engine.start(thresholds=list(thresholds), max_pending=max_pending)
    tokens: list[int] = []
    logits, exit_layers, layers_executed = [], [], 0
    fed = list(prompt)
    for i in range(new_tokens):
        step = state.step(fed)
        tokens.append(int(step.logits.argmax()))
        fed = tokens[-1:] if forced is None else list(forced[i : i + 1])
        logits.append(np.array(step.logits, dtype=np.float32))  # a copy: the engine may reuse its buffer
        exit_layers.append(int(step.exit_layer))
        layers_executed += sum(sizes[: int(step.segments_run)])
    return Written(tokens, np.stack(logits), exit_layers, layers_executed)


def _propagated(kv_cache_strategy: str, prompt: Sequence[int]) -> int | None:
    """The first position that an engine lets exit with its state as the input of the skipped layers, if it does so."""
    return len(prompt) if kv_cache_strategy == PROPAGATE else None


@torch.no_grad()
def full_logits(source: SourceModel, text: Sequence[int], first: int) -> np.ndarray:
    """[N, V]: the HuggingFace model's logits at the N positions of `text` from `first` on."""
    ids = torch.tensor([list(text)], device=source.device)
    return source.run(ids, []).logits[0, first:].float().cpu().numpy().copy()  # or all positions would stay in memory


def _judge(
    source: SourceModel,
    routers: RouterSet,
    text: Sequence[int],
    first: int,
    thresholds: Sequence[float],
    propagated: int | None,
) -> tuple[np.ndarray, tuple[np.ndarray, list[int], dict[int, np.ndarray]]]:
    """At the N positions of `text` from `first` on: the HuggingFace model's logits [N, V]; and the oracle's, with its
    exit layers and margins."""
    judged = oracle(source, routers, text, thresholds, propagated)
    if judged.full_logits is None:
        full = full_logits(source, text, first)
    else:
        full = judged.full_logits[first:].float().cpu().numpy().copy()  # or all positions would stay in memory
    distance = (judged.scores[first:].cpu() - torch.tensor(list(thresholds))).abs().numpy()
    margins = {layers: distance[:, k] for k, layers in enumerate(routers.checkpoints)}
    return full, (judged.logits[first:].float().cpu().numpy().copy(), judged.exit_layers[first:].tolist(), margins)


def tally(
    check: Check, written: Written, reference: np.ndarray, exit_layers: Sequence[int], margins: Mapping[int, np.ndarray]
) -> None:
    """Adds one prompt's N positions to `check`.

    Args:
        reference: [N, V] logits after the same prefixes.
        exit_layers: N layer counts the reference left at.
        margins: layers at a checkpoint -> [N], |score - threshold| there; empty where nothing may exit.
    """
    for i, (token, left) in enumerate(zip(written.tokens, written.exit_layers, strict=True)):
        check.tokens += 1
        check.exits[left] += 1
        if count_position(check, i, token, left, reference[i], exit_layers[i], margins):
            error = float(np.abs(written.logits[i] - reference[i]).max())
            check.max_error = float(np.maximum(check.max_error, error))  # unlike max(), keeps a NaN
            check.largest_logit = max(check.largest_logit, float(np.abs(reference[i]).max()))
    check.layers_executed += written.layers_executed
    check.written.append((written.tokens, written.exit_layers))


def count_position(
    check: Check, i: int, token: int, left: int, reference: np.ndarray, should: int, margins: Mapping[int, np.ndarray]
) -> bool:
    """Counts position i if it differs: `token` left after `left` layers, where the reference left after `should` with
    logits `reference` [V]; `margins` as of `Answers`. Says whether it left where the reference did."""
    if left != should:
        # The shallower of the two is where one decided to leave and the other to go on.
        undecided_by = margins.get(min(left, should))
        gap = float(undecided_by[i]) if undecided_by is not None else float("inf")
        _count_difference(check, gap, f"new token {i + 1} left after layer {left} instead of {should}")
        return False
    expected = int(reference.argmax())
    if token != expected:
        gap = float(reference[expected] - reference[token])
        _count_difference(check, gap, f"new token {i + 1} is {token} instead of {expected}")
    return True


def _count_difference(check: Check, gap: float, sentence: str) -> None:
    """Counts a position that differs by how far the reference was from being undecided there."""
    if gap < check.tolerance.forgiven_gap:
        check.forgiven += 1
        return
    check.wrong += 1
    if len(check.differences) < SHOWN_DIFFERENCES:
        check.differences.append(f"{sentence} (reference decided by {gap:.2g})")
