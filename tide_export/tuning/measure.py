"""Runs the deployed graph over the prompts of `tune` and records the result of every exit.

A token depends on its prefix alone, because K/V are exact. So the graph runs C+1 times over a prompt: once at full
depth, which gives every router's score, and once for each of C checkpoints with every token exiting there. The scores
and the C+1 tokens of each position determine the result of *any* thresholds, up to the rounding of pending tokens that
catch up together (`tests/tuning` compares both).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
    """

    scores: np.ndarray
    early: np.ndarray
    full: np.ndarray
    layers: tuple[int, ...]
    depth: int

    @property
    def agrees(self) -> np.ndarray:
        """Whether each checkpoint's token is that of full depth, bool [n, P, C]."""
        return self.early == self.full[..., None]

    def outcome(self, thresholds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens under C thresholds and the layers of each, both int64 [n, P]."""
        n, positions, columns = self.scores.shape
        exit_at = exits(self.scores.reshape(n * positions, columns), thresholds).reshape(n, positions, 1)
        tokens = np.take_along_axis(np.concatenate([self.early, self.full[..., None]], axis=2), exit_at, axis=2)
        return tokens[..., 0], np.array([*self.layers, self.depth])[exit_at[..., 0]]

    def losses(self, thresholds: Sequence[float]) -> np.ndarray:
        """Returns each prompt's share of positions with another token than full depth, float64 [n]."""
        tokens, _ = self.outcome(thresholds)
        return (tokens != self.full).mean(axis=1)


def measure_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    prompt_length: int,
    checkpoints: Sequence[int],
    advance: Callable[[float], None] = lambda amount: None,
) -> Measurement:
    """Runs every prompt C+1 times.

    Args:
        prompts: n prompts of `prompt_length + P - 1` token ids each. The first step takes `prompt_length` tokens and
            gives position 0; each further step takes the next token of the text (not the model's).
        checkpoints: the C checkpoints that may exit, as layers before them, ascending.
        advance: called with 1 after each prompt.

    Raises:
        TuneError: a router gave no score, or a token did not exit where the thresholds require it.
        GenerationError: a step failed, or logits are not finite.
    """
    every, depth = engine.manifest.checkpoints, engine.manifest.model.num_layers
    columns = [every.index(layers) for layers in checkpoints]
    positions = len(prompts[0]) - prompt_length + 1
    scores = np.empty((len(prompts), positions, len(columns)), np.float32)
    early = np.empty(scores.shape, np.int64)
    full = np.empty(scores.shape[:2], np.int64)
    for i, ids in enumerate(prompts):
        full[i], all_scores = _run(engine, ids, prompt_length, [MAX_THRESHOLD] * len(every), depth)
        scores[i] = all_scores[:, columns]
        for c, column in enumerate(columns):
            thresholds = [ALWAYS_EXIT if k == column else NEVER_EXIT for k in range(len(every))]
            early[i, :, c], _ = _run(engine, ids, prompt_length, thresholds, every[column])
        advance(1)
    if not np.isfinite(scores).all():
        raise TuneError(f"bundle {engine.bundle.path}: a router gave no score at full depth; export the bundle again")
    return Measurement(scores, early, full, tuple(checkpoints), depth)


def _run(
    engine: Engine, ids: Sequence[int], prompt_length: int, thresholds: Sequence[float], exit_layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs one prompt; returns greedy tokens [P], and scores [P, K-1] of all the bundle's routers."""
    state = engine.start(thresholds, max_pending=NO_LIMIT)
    tokens, scores = [], []
    for end in range(prompt_length, len(ids) + 1):
        result = state.step(ids[state.length : end])
        if result.exit_layer != exit_layer:
            raise TuneError(
                f"bundle {engine.bundle.path}: a token exited after layer {result.exit_layer} instead of {exit_layer} "
                f"at thresholds {list(thresholds)}; export the bundle again"
            )
        tokens.append(sample(result.logits))
        scores.append(result.scores)
    return np.array(tokens), np.array(scores)
