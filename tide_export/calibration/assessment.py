"""Holds the measurements of every exit on held-out tokens, for the report and its tables.

Most records are arrays over n tokens of the test split, from which the outcome of any thresholds is computed without
running the model again. Needs only NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tide_export.common.changed_tokens import Change, change
from tide_export.thresholds.pareto import exits


@dataclass(frozen=True)
class Outcome:
    """The effect of one choice of thresholds on held-out tokens.

    Attributes:
        thresholds: one per checkpoint.
        change: changed tokens and the change of perplexity, at `Evaluation.temperature`.
        layers: mean layers per token.
        kl: mean KL divergence of the exit's distribution from the full model's, nats.
        exit_shares: share of tokens that exit at each checkpoint; the rest runs all layers.
    """

    thresholds: tuple[float, ...]
    change: Change
    layers: float
    kl: float
    exit_shares: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """Measurements at C checkpoints of n tokens of documents used for measuring only.

    Attributes:
        num_layers: layers of the model.
        checkpoints: layers run at each checkpoint, ascending.
        scores: float32 [n, C], every router's score (after probability calibration).
        labels: bool [n, C], the training labels.
        unchanged: bool [n, C], whether the exit's likeliest token is full depth's, so that no greedy token changes.
        kl: float32 [n, C], KL(full || exit) in nats.
        changed: float32 [n, C], `changed_tokens` of an exit there.
        added: float32 [n, C], `added_loss` of an exit there, nats.
        documents: int64 [n], the document of each token.
        temperature: of `changed` and `added`; 0: greedy.
        loops: how often the same layers run, each time counted in `num_layers`.
    """

    num_layers: int
    checkpoints: tuple[int, ...]
    scores: np.ndarray
    labels: np.ndarray
    unchanged: np.ndarray
    kl: np.ndarray
    changed: np.ndarray
    added: np.ndarray
    documents: np.ndarray
    temperature: float
    loops: int = 1

    def outcome(self, thresholds: Sequence[float]) -> Outcome:
        """Computes the effect of `thresholds` (one per checkpoint) on these tokens."""
        taken = exits(self.scores, thresholds)
        rows = np.arange(len(taken))

        def at_exit(columns: np.ndarray) -> np.ndarray:
            return np.concatenate([columns, np.zeros((len(columns), 1), columns.dtype)], axis=1)[rows, taken]

        return Outcome(
            thresholds=tuple(float(t) for t in thresholds),
            change=change(at_exit(self.changed), at_exit(self.added), self.documents, self.temperature),
            layers=float(np.array([*self.checkpoints, self.num_layers])[taken].mean()),
            kl=float(at_exit(self.kl).mean()),
            exit_shares=tuple(float((taken == k).mean()) for k in range(len(self.checkpoints))),
        )

    def part(self, rows: np.ndarray) -> "Evaluation":
        """Returns the measurements of some of the tokens."""
        names = ("scores", "labels", "unchanged", "kl", "changed", "added", "documents")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True)
class Convergence:
    """Similarity of each layer's hidden state to the last layer's, on a sample of tokens, without lenses.

    Attributes:
        layers: layers run, 1 .. num_layers.
        changed: share of changed tokens, greedy.
        kl: mean KL(full || head on this layer's normalized hidden state), nats.
        cosine: mean cosine similarity of the raw hidden state with the last layer's.
        tokens: size of the sample.
    """

    layers: tuple[int, ...]
    changed: tuple[float, ...]
    kl: tuple[float, ...]
    cosine: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class Example:
    """A passage of held-out text with the prediction at each position and its exit.

    Attributes:
        pieces: text of each token.
        predicted: text of the token predicted *after* each token, by the exit's head.
        exit_layers: layers run for each prediction.
        unchanged: whether each prediction is full depth's.
    """

    pieces: tuple[str, ...]
    predicted: tuple[str, ...]
    exit_layers: tuple[int, ...]
    unchanged: tuple[bool, ...]


@dataclass(frozen=True)
class Costs:
    """Floating-point operations per token; a multiplication with an addition counts as two.

    Attributes:
        layer: mean of one decoder layer, without attention over the cache.
        head: final norm and head, run once per token at any exit.
        router: one router with its norm, run at each checkpoint that a token reaches.
        lens: one lens, times the share of the checkpoints that have one.
    """

    layer: float
    head: float
    router: float
    lens: float

    def per_token(self, outcome: Outcome, checkpoints: Sequence[int]) -> float:
        """Computes the mean cost of a token under `outcome`, including routers and lenses."""
        reached = 0.0
        remaining = 1.0
        for share in outcome.exit_shares:
            reached += remaining
            remaining -= share
        return self.layer * outcome.layers + self.head + (self.router + self.lens) * reached


@dataclass(frozen=True)
class Assessment:
    """All measurements of `calibrate` on held-out documents.

    Attributes:
        model: name of the source model.
        thresholds: the bundle's default, one per checkpoint (1.0 where min_layers switches a checkpoint off).
        evaluation, convergence, examples, costs: records of the classes above.
        provenance: the router file's record: dataset, split sizes, config, versions, per-checkpoint `report`.
    """

    model: str
    thresholds: tuple[float, ...]
    evaluation: Evaluation
    convergence: Convergence
    examples: tuple[Example, ...]
    costs: Costs
    provenance: dict[str, Any]
