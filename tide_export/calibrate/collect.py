"""Runs the frozen model over sequences and keeps a labelled sample of their tokens: third step of `calibrate`.

One forward pass per batch gives the raw states at every checkpoint and after the last layer. A reservoir decides which
tokens to keep, and only for those are norm, heads and labels computed. What is held is `capacity` x checkpoints
x width floats, whatever the number of tokens read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from tide_export.calibrate.labels import agreement_labels, cosine_labels, top1
from tide_export.calibrate.reservoir import Reservoir
from tide_export.calibrate.sequences import TokenSequence
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.model import SourceModel
from tide_export.progress import stage

SORTED_SEQUENCES = 128  # sequences sorted by length together, so that little is padded
CPU_TOKENS = 1024  # a CPU gains nothing from a larger pass, but its attention matrices become allocations of their own


@dataclass(frozen=True)
class Sample:
    """Tokens kept from a split, uniformly drawn.

    Attributes:
        features: per checkpoint the normed states, float32 [n, D'] on the CPU: exactly what a router sees at run time.
        labels: per checkpoint whether the token may leave there, bool [n].
        seen: tokens the n were drawn from.
    """

    features: dict[int, torch.Tensor]
    labels: dict[int, torch.Tensor]
    seen: int

    @property
    def kept(self) -> int:
        return len(next(iter(self.labels.values())))


@torch.no_grad()
def collect(
    source: SourceModel,
    sequences: Sequence[TokenSequence],
    checkpoints: Sequence[int],
    config: TideConfig,
    capacity: int,
    title: str,
) -> Sample:
    """A uniform sample of at most `capacity` tokens of `sequences`, with features and labels at each checkpoint.

    Raises:
        CalibrationError: a token id the model does not have, or NaN or infinity in a hidden state.
    """
    tokens = sum(len(sequence.ids) for sequence in sequences)
    _check_ids(source, sequences)
    depth, size = source.num_layers, min(capacity, tokens)
    reservoir = Reservoir(size, np.random.default_rng(config.seed))
    features = {layers: torch.empty(size, source.normed_size) for layers in checkpoints}
    labels = {layers: torch.empty(size, dtype=torch.bool) for layers in checkpoints}

    with stage(title, total=tokens) as advance:
        tokens_per_pass = CPU_TOKENS if source.device.type == "cpu" else None
        for ids, mask in _batches(sequences, config.calibration_batch, tokens_per_pass):
            states = source.raw_states(ids.to(source.device), [*checkpoints, depth], mask.to(source.device))
            real = mask.bool().to(source.device)
            raw = {layers: state[real].float() for layers, state in states.items()}
            _check_finite(source, raw)
            rows, slots = (torch.from_numpy(part) for part in reservoir.offer(len(raw[depth])))
            last = raw[depth][rows]
            full_top1 = top1(source, source.normed(last)) if config.label == "agreement" else None
            for layers in checkpoints:
                kept = raw[layers][rows]
                normed = source.normed(kept)
                features[layers][slots] = normed.cpu()
                if full_top1 is None:
                    label = cosine_labels(kept, last, config.convergence_threshold)
                else:
                    label = agreement_labels(source, normed, full_top1)
                labels[layers][slots] = label.cpu()
            advance(int(mask.sum()))
    return Sample(features, labels, reservoir.seen)


def _batches(
    sequences: Sequence[TokenSequence], size: int, tokens: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and attention mask, int64 [B, S] each, of sequences of similar length, padded on the right.

    B is at most `size`, and B x S at most `tokens` where B > 1. The padding's token id is any: behind a causal mask no
    real token sees it, and nothing of it is kept.
    """
    stream = iter(sequences)
    while window := sorted(islice(stream, SORTED_SEQUENCES), key=lambda sequence: -len(sequence.ids)):
        while window:
            length = len(window[0].ids)
            rows = size if tokens is None else min(size, max(1, tokens // length))
            batch, window = window[:rows], window[rows:]
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, sequence in enumerate(batch):
                ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
                mask[row, : len(sequence.ids)] = 1
            yield ids, mask


def _check_ids(source: SourceModel, sequences: Sequence[TokenSequence]) -> None:
    embedding = source.model.get_input_embeddings()
    assert isinstance(embedding.weight, torch.Tensor)
    known = embedding.weight.shape[0]
    largest = max(max(sequence.ids) for sequence in sequences)
    if largest >= known:
        raise CalibrationError(
            f"the tokenizer gives token id {largest} but {source.name} knows {known} tokens: it is another model's"
        )


def _check_finite(source: SourceModel, raw: dict[int, torch.Tensor]) -> None:
    for layers, state in sorted(raw.items()):
        if not bool(torch.isfinite(state).all()):
            raise CalibrationError(
                f"model {source.name!r} gives NaN or infinity in its hidden state after layer {layers}: "
                "no router can be fitted to it"
            )
