"""Measures perplexity, changed tokens by depth, and what training changed at full depth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.adaptation.losses import Batch
from tide_export.calibration.labels import blocks, predict
from tide_export.common.changed_tokens import TEMPERATURE, Change, added_loss, change, changed_tokens
from tide_export.model.source import SourceModel


@dataclass(frozen=True)
class Quality:
    """The quality of a model on held-out text.

    Attributes:
        tokens: number of tokens measured on.
        perplexity: of the text's next token at full depth.
        changed: for each number of layers from 1, the share of greedy tokens that an exit there changes.
    """

    tokens: int
    perplexity: float
    changed: list[float]


@torch.no_grad()
def measure(source: SourceModel, batches: Sequence[Batch]) -> Quality:
    """Runs `source` in float32 on `batches`."""
    depth = source.num_layers
    changed, tokens = torch.zeros(depth, dtype=torch.long), 0
    nll, scored = 0.0, 0
    for batch in batches:
        positions, labels = batch.positions(), batch.labels()
        raw = source.raw_hidden(batch.ids, range(1, depth + 1))
        hidden = {layers: source.normalize(one.flatten(0, 1)[positions]) for layers, one in raw.items()}
        for rows in blocks(source, len(positions)):
            full = predict(source, hidden[depth][rows])
            likeliest, following = full.likeliest(), labels[rows].cpu()
            known = following >= 0
            nll += float(full.nll(following.clamp_min(0))[known].sum())
            scored += int(known.sum())
            tokens += len(likeliest)
            for layers in range(1, depth):
                changed[layers - 1] += (~predict(source, hidden[layers][rows]).unchanged(likeliest)).sum()
    perplexity = math.exp(nll / max(1, scored)) if nll / max(1, scored) < 700 else math.inf
    return Quality(tokens, perplexity, (changed / tokens).tolist())


@torch.no_grad()
def measure_change(original: SourceModel, adapted: SourceModel, batches: Sequence[Batch]) -> tuple[Change, Change]:
    """Measures what `adapted` changes of the text of `original`, both at full depth.

    Returns:
        The change at `TEMPERATURE`, and of greedy text.
    """
    depth = original.num_layers
    parts: dict[float, list[np.ndarray]] = {TEMPERATURE: [], 0.0: []}  # [2, n] each
    texts: list[int] = []
    for batch in batches:
        positions = batch.positions()
        before, after = (
            source.normalize(source.raw_hidden(batch.ids, [depth])[depth].flatten(0, 1)[positions])
            for source in (original, adapted)
        )
        for rows in blocks(original, len(positions)):
            full, now = (
                predict(source, hidden[rows]).logits.cpu().numpy()
                for source, hidden in ((original, before), (adapted, after))
            )
            for temperature, measured in parts.items():
                measured.append(np.stack([changed_tokens(full, now, temperature), added_loss(full, now, temperature)]))
        first = len(set(texts))
        texts += [first + row for row, length in enumerate(batch.lengths.tolist()) for _ in range(length)]
    changes = []
    for temperature, measured in parts.items():
        changed, added = np.concatenate(measured, axis=-1)
        changes.append(change(changed, added, texts, temperature))
    return changes[0], changes[1]
