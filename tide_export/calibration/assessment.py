"""What every exit would have given for held-out tokens: the measurements that report and tables are made of.

Made by `calibrate` from the test split, after routers and lenses are fitted; read by `report`. Everything here is
arrays of n tokens; what follows for a choice of thresholds is computed on them without running the model again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_export.thresholds.pareto import exits


@dataclass(frozen=True)
class Outcome:
    """What one choice of thresholds does to held-out tokens.

    Attributes:
        thresholds: one per checkpoint.
        agreement: share of tokens whose top-1 is the full model's.
        layers: mean layers per token.
        kl: mean KL divergence of the exit's distribution from the full model's, nats.
        perplexity_change: perplexity of the text under the exits over that under the full model, minus 1; NaN where no
            text follows.
        exit_shares: share of tokens that leave at each checkpoint; the rest runs all layers, which is no exit.
    """

    thresholds: tuple[float, ...]
    agreement: float
    layers: float
    kl: float
    perplexity_change: float
    exit_shares: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """C checkpoints, n tokens of documents that neither fitting nor stopping nor probability calibration has seen.

    Attributes:
        num_layers: layers of the model.
        checkpoints: layers run at each checkpoint, ascending.
        scores: float32 [n, C], every router's score (after probability calibration).
        labels: bool [n, C], what each router was taught to predict.
        agrees: bool [n, C], the exit's top-1 is the full model's.
        kl: float32 [n, C], KL(full || exit) in nats.
        nll: float32 [n, C+1], nats of the text's next token at every exit and, last, of the full model; NaN where the
            text ends.
        documents: int64 [n], the document each token is from.
    """

    num_layers: int
    checkpoints: tuple[int, ...]
    scores: np.ndarray
    labels: np.ndarray
    agrees: np.ndarray
    kl: np.ndarray
    nll: np.ndarray
    documents: np.ndarray

    def outcome(self, thresholds: Sequence[float]) -> Outcome:
        """What `thresholds` (one per checkpoint) do to these tokens."""
        left = exits(self.scores, thresholds)
        rows = np.arange(len(left))

        def at_exit(columns: np.ndarray, full: float) -> np.ndarray:
            return np.concatenate([columns, np.full((len(columns), 1), full, columns.dtype)], axis=1)[rows, left]

        change = self.nll[rows, left] - self.nll[:, -1]
        change = change[np.isfinite(change)]
        return Outcome(
            thresholds=tuple(float(t) for t in thresholds),
            agreement=float(at_exit(self.agrees, True).mean()),
            layers=float(np.array([*self.checkpoints, self.num_layers])[left].mean()),
            kl=float(at_exit(self.kl, 0.0).mean()),
            perplexity_change=float(np.expm1(change.mean())) if len(change) else float("nan"),
            exit_shares=tuple(float((left == k).mean()) for k in range(len(self.checkpoints))),
        )


@dataclass(frozen=True)
class Convergence:
    """How near each layer's state is to the last, on a sample of tokens and without any lens.

    Attributes:
        layers: layers run, 1 .. num_layers.
        agreement: share of tokens whose top-1 is already the full model's.
        kl: mean KL(full || head on this layer's normalized state), nats.
        cosine: mean cosine similarity of the raw state with the last layer's.
        tokens: size of the sample.
    """

    layers: tuple[int, ...]
    agreement: tuple[float, ...]
    kl: tuple[float, ...]
    cosine: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class Example:
    """A passage of held-out text, for reading: what was predicted at each position and from where.

    Attributes:
        pieces: text of each token.
        predicted: text of the token predicted *after* each token, by the exit's head.
        exit_layers: layers run for each prediction.
        agrees: whether each prediction is the full model's own.
    """

    pieces: tuple[str, ...]
    predicted: tuple[str, ...]
    exit_layers: tuple[int, ...]
    agrees: tuple[bool, ...]


@dataclass(frozen=True)
class Costs:
    """Floating-point operations per token, counting two for a multiplication with an addition.

    Attributes:
        layer: of one decoder layer (the mean), attention over the cache not counted.
        head: final norm and head, run once per token whatever it exits at.
        router: of one router, its norm included; each checkpoint a token reaches costs one.
        lens: of one lens; 0 with identity exits.
    """

    layer: float
    head: float
    router: float
    lens: float

    def per_token(self, outcome: Outcome, checkpoints: Sequence[int]) -> float:
        """Mean cost of a token under `outcome`, routers and lenses it passes included."""
        reached = 0.0
        going_on = 1.0
        for share in outcome.exit_shares:
            reached += going_on
            going_on -= share
        return self.layer * outcome.layers + self.head + (self.router + self.lens) * reached


@dataclass(frozen=True)
class Assessment:
    """All that `calibrate` measured on held-out documents, for the report.

    Attributes:
        model: name of the source model.
        thresholds: the bundle's default, one per checkpoint (1.0 where min_layers switches a checkpoint off).
        evaluation, convergence, examples, costs: see there.
        provenance: the router file's record: dataset, split sizes, config, versions, per-checkpoint `report`.
    """

    model: str
    thresholds: tuple[float, ...]
    evaluation: Evaluation
    convergence: Convergence
    examples: tuple[Example, ...]
    costs: Costs
    provenance: dict[str, Any]
