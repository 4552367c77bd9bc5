"""Measures perplexity and the agreement of every layer with full depth on held-out text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tide_export.adaptation.losses import Batch
from tide_export.calibration.labels import blocks, predict
from tide_export.model.source import SourceModel


@dataclass(frozen=True)
class Quality:
    """The quality of a model on held-out text.

    Attributes:
        tokens: number of tokens measured on.
        perplexity: of the next token at full depth.
        agreement: for each number of layers from 1, the share of tokens whose top-1 prediction equals full depth's.
        top1: full depth's top-1 predictions.
    """

    tokens: int
    perplexity: float
    agreement: list[float]
    top1: list[int]

    def same_as(self, other: "Quality") -> float:
        """Returns the share of tokens whose top-1 prediction at full depth equals that of `other`."""
        return sum(a == b for a, b in zip(self.top1, other.top1, strict=True)) / len(self.top1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure(source: SourceModel, batches: Sequence[Batch]) -> Quality:
    """Runs `source` in float32 on `batches`."""
    depth = source.num_layers
    agreeing, top1 = torch.zeros(depth, dtype=torch.long), list[int]()
    nll, scored = 0.0, 0
    for batch in batches:
        positions, labels = batch.positions(), batch.labels()
        raw = source.raw_hidden(batch.ids, range(1, depth + 1))
        hidden = {layers: source.normalize(one.flatten(0, 1)[positions]) for layers, one in raw.items()}
        for rows in blocks(source, len(positions)):
            full = predict(source, hidden[depth][rows])
            best, following = full.top1(), labels[rows].cpu()
            top1 += best.tolist()
            known = following >= 0
            nll += float(full.nll(following.clamp_min(0))[known].sum())
            scored += int(known.sum())
            for layers in range(1, depth):
                agreeing[layers - 1] += predict(source, hidden[layers][rows]).agree(best).sum()
            agreeing[depth - 1] += len(best)
    perplexity = math.exp(nll / max(1, scored)) if nll / max(1, scored) < 700 else math.inf
    return Quality(len(top1), perplexity, (agreeing / len(top1)).tolist(), top1)
