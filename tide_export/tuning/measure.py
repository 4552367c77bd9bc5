"""Runs the deployed graph over the prompts of `tune` and records the result of every exit.

A token depends on its prefix alone, because K/V are exact. So the graph runs C+1 times over a prompt: once at full
depth, which gives every router's score, and once for each of C checkpoints with every token exiting there. The scores
and the C+1 tokens of each position, drawn with the same noise, determine the result of *any* thresholds, up to the
rounding of pending tokens that catch up together (`tests/tuning` compares both).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tide_export.common.changed_tokens import Change, added_loss, change
from tide_export.errors import TuneError
from tide_export.runtime.engine import Engine
from tide_export.runtime.stepping import NO_LIMIT, sample
from tide_export.thresholds.pareto import exits
from tide_export.thresholds.resolve import ALWAYS_EXIT, MAX_THRESHOLD, NEVER_EXIT


@dataclass(frozen=True)
class Measurement:
    """Scores and tokens of n prompts with P positions each, at C checkpoints.

    Attributes:
        scores: float32 [n, P, C], the routers' scores.
        early: int64 [n, P, C], the token of an exit at each checkpoint.
        full: int64 [n, P], the token of full depth after the same prefix.
        layers: layers before each of the C checkpoints.
        depth: layers of the model.
        added: float64 [n, P, C], `added_loss` of an exit at each checkpoint, nats.
        temperature: at which the tokens were drawn; 0: greedy.
    """

    scores: np.ndarray
    early: np.ndarray
    full: np.ndarray
    layers: tuple[int, ...]
    depth: int
    added: np.ndarray
    temperature: float = 0.0

    @property
    def changed(self) -> np.ndarray:
        """Whether an exit at each checkpoint changes the token of full depth, bool [n, P, C]."""
        return self.early != self.full[..., None]

    def outcome(self, thresholds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens under C thresholds and the layers of each, both int64 [n, P]."""
        exit_at = self._exits(thresholds)
        tokens = np.take_along_axis(np.concatenate([self.early, self.full[..., None]], axis=2), exit_at, axis=2)
        return tokens[..., 0], np.array([*self.layers, self.depth])[exit_at[..., 0]]

    def losses(self, thresholds: Sequence[float]) -> np.ndarray:
        """Returns the share of changed tokens of each prompt, float64 [n]."""
        tokens, _ = self.outcome(thresholds)
        return (tokens != self.full).mean(axis=1)

    def change(self, thresholds: Sequence[float]) -> Change:
        """Returns changed tokens and the change of perplexity under C thresholds, with errors over prompts."""
        tokens, _ = self.outcome(thresholds)
        nothing = np.zeros((*self.full.shape, 1))
        added = np.take_along_axis(np.concatenate([self.added, nothing], axis=2), self._exits(thresholds), axis=2)
        n, positions = self.full.shape
        changed = (tokens != self.full).ravel().astype(np.float64)
        return change(changed, added.ravel(), np.arange(n).repeat(positions), self.temperature)

    def _exits(self, thresholds: Sequence[float]) -> np.ndarray:
        """Returns the index of the checkpoint at which each position exits, int64 [n, P, 1]; C: none."""
        n, positions, columns = self.scores.shape
        return exits(self.scores.reshape(n * positions, columns), thresholds).reshape(n, positions, 1)


def measure_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    prompt_length: int,
    checkpoints: Sequence[int],
    advance: Callable[[float], None] = lambda amount: None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Measurement:
    """Runs every prompt C+1 times.

    Args:
        prompts: n prompts of `prompt_length + P - 1` token ids each. The first step takes `prompt_length` tokens and
            gives position 0; each further step takes the next token of the text (not the model's).
        checkpoints: the C checkpoints that may exit, as layers before them, ascending.
        advance: called with 1 after each prompt.
        temperature: at which tokens are drawn, by the runtime's sampler.
        seed: of the first prompt's draws; each further prompt has the next one.

    Raises:
        TuneError: a router gave no score, or a token did not exit where the thresholds require it.
        GenerationError: a step failed, or logits are not finite.
    """
    every, depth = engine.manifest.checkpoints, engine.manifest.model.num_layers
    columns = [every.index(layers) for layers in checkpoints]
    positions = len(prompts[0]) - prompt_length + 1
    scores = np.empty((len(prompts), positions, len(columns)), np.float32)
    early = np.empty(scores.shape, np.int64)
    full, added = np.empty(scores.shape[:2], np.int64), np.empty(scores.shape)
    for i, ids in enumerate(prompts):
        full_logits, all_scores = _run(engine, ids, prompt_length, [MAX_THRESHOLD] * len(every), depth)
        full[i], scores[i] = _draw(full_logits, prompt_length, temperature, seed + i), all_scores[:, columns]
        for c, column in enumerate(columns):
            thresholds = [ALWAYS_EXIT if k == column else NEVER_EXIT for k in range(len(every))]
            logits, _ = _run(engine, ids, prompt_length, thresholds, every[column])
            early[i, :, c] = _draw(logits, prompt_length, temperature, seed + i)
            added[i, :, c] = added_loss(full_logits, logits, temperature)
        advance(1)
    if not np.isfinite(scores).all():
        raise TuneError(f"bundle {engine.bundle.path}: a router gave no score at full depth; export the bundle again")
    return Measurement(scores, early, full, tuple(checkpoints), depth, added, temperature)


def _run(
    engine: Engine, ids: Sequence[int], prompt_length: int, thresholds: Sequence[float], exit_layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs one prompt; returns logits [P, V], and scores [P, K-1] of all the bundle's routers."""
    state = engine.start(thresholds, max_pending=NO_LIMIT)
    logits, scores = [], []
    for end in range(prompt_length, len(ids) + 1):
        result = state.step(ids[state.length : end])
        if result.exit_layer != exit_layer:
            raise TuneError(
                f"bundle {engine.bundle.path}: a token exited after layer {result.exit_layer} instead of {exit_layer} "
                f"at thresholds {list(thresholds)}; export the bundle again"
            )
        logits.append(result.logits)
        scores.append(result.scores)
    return np.array(logits), np.array(scores)


def _draw(logits: np.ndarray, prompt_length: int, temperature: float, seed: int) -> list[int]:
    """Draws the token of each position as a generation from this prompt does, int [P]."""
    return [
        sample(row, position, temperature=temperature, seed=seed) for position, row in enumerate(logits, prompt_length)
    ]
