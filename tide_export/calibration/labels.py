"""Computes the labels that routers learn to predict: whether a token may exit at a checkpoint.

`unchanged`, the default, is for greedy decoding: the exit's likeliest token is the full model's, so no token is
changed. `kl` is for sampling: the exit's distribution is within a bound of the full model's. `cosine` is TIDE's: the
direction of the raw hidden state no longer changes. (TIDE compares with a hidden state after the final norm, which
mixes direction with normalization.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tide_export.calibration.collect import Sample
from tide_export.calibration.config import TideConfig
from tide_export.calibration.parallel import in_parallel
from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens

LOGITS_BYTES = 64 << 20  # logits computed at a time; heads with scaling or softcaps hold a few copies of them
LOGITS_ROWS = 512  # maximum tokens of a block, so that the logits of a small vocabulary stay in the CPU's cache
NORM_ROWS = 8192  # tokens normalized at a time
FREQUENT = 1 / 8  # share of the vocabulary that `unchanged` compares first
SLACK = 1e-4  # relative to the norms of hidden state and row; far above the rounding of a logit


@dataclass(frozen=True)
class Predictions:
    """The logits of n tokens, float32 [n, V] on the model's device; methods return tensors on the CPU."""

    logits: torch.Tensor

    def likeliest(self) -> torch.Tensor:
        """Returns the likeliest tokens, int64 [n]."""
        return self.logits.argmax(-1).cpu()

    def unchanged(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns whether each of `tokens`, int64 [n], is the likeliest, bool [n]; faster than `likeliest`."""
        return (self._of(tokens) == self.logits.amax(-1)).cpu()

    def nll(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes -log P of each of `tokens`, int64 [n], in nats, float32 [n]."""
        return (self.logits.logsumexp(-1) - self._of(tokens)).cpu()

    def _of(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.gather(-1, tokens.to(self.logits.device)[:, None])[:, 0]


class Target:
    """The full model's distribution for n tokens, for the divergence of several exits from it."""

    def __init__(self, full: Predictions):
        log_probabilities = full.logits.log_softmax(-1)
        self.probabilities = log_probabilities.exp()
        self.sum = self.probabilities.sum(-1)  # not exactly 1, and large logits would multiply the error
        self.negative_entropy = torch.linalg.vecdot(self.probabilities, log_probabilities)

    def divergence(self, exit_: Predictions) -> torch.Tensor:
        """Computes KL(full || exit) in nats, float32 [n], as cross entropy minus entropy."""
        cross = self.sum * exit_.logits.logsumexp(-1) - torch.linalg.vecdot(self.probabilities, exit_.logits)
        return (self.negative_entropy + cross).clamp_min(0).cpu()


@torch.no_grad()
def predict(source: SourceModel, hidden: torch.Tensor) -> Predictions:
    """Applies the head to normalized hidden states [n, D']."""
    return Predictions(source.head(hidden[None].to(source.device))[0].float())


@torch.no_grad()
def normalize(source: SourceModel, raw: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
    """Applies lens and final norm to raw hidden states [n, D]; returns float32 [n, D'] on the CPU."""
    translate = torch.nn.Identity() if lens is None else lens.to(source.device)
    parts = (source.normalize(translate(part.to(source.device))) for part in raw.split(NORM_ROWS))
    return torch.cat([part.float().cpu() for part in parts])


def likeliest(source: SourceModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the head's likeliest tokens, int64 [n], for normalized hidden states [n, D']."""
    return _by_blocks(source, len(hidden), lambda rows: predict(source, hidden[rows]).likeliest())


def divergence(source: SourceModel, hidden: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Computes KL(full || exit) in nats, float32 [n], for normalized hidden states [n, D'] each."""
    return _by_blocks(
        source, len(hidden), lambda rows: Target(predict(source, full[rows])).divergence(predict(source, hidden[rows]))
    )


def unchanged(source: SourceModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns whether the likeliest token of normalized hidden states [n, D'] is `tokens` [n], bool [n].

    On a CPU the most frequent tokens are compared first: if one of them is above the full model's token, as for most
    hidden states of early layers, the rest of the head is not computed.
    """
    matrix = head_matrix(source) if source.device.type == "cpu" else None
    if matrix is None:
        return _by_blocks(source, len(hidden), lambda rows: predict(source, hidden[rows]).unchanged(tokens[rows]))
    frequent = matrix[most_frequent(tokens, source.vocab_size, int(source.vocab_size * FREQUENT) + 1)]
    norm = matrix.norm(dim=-1).max()

    def compare(rows: slice) -> torch.Tensor:
        here, truth = hidden[rows], tokens[rows]
        own = torch.linalg.vecdot(here, matrix[truth]) + SLACK * norm * here.norm(dim=-1)
        left = ((here @ frequent.T).amax(-1) <= own).nonzero()[:, 0]
        same = torch.zeros(len(here), dtype=torch.bool)
        same[left] = predict(source, here[left]).unchanged(truth[left])
        return same

    return _by_blocks(source, len(hidden), compare)


def most_frequent(tokens: torch.Tensor, vocab_size: int, count: int) -> torch.Tensor:
    """Returns the `count` most frequent of `tokens`, int64 [n], the most frequent first."""
    return torch.bincount(tokens, minlength=vocab_size).sort(descending=True, stable=True).indices[:count]


@torch.no_grad()
def head_matrix(source: SourceModel) -> torch.Tensor | None:
    """Returns the head's rows [V, D'], float32 on the CPU.

    None if the logits are not the plain product with them, but scaled or with softcaps.
    """
    rows = source.head_rows()
    if rows is None:
        return None
    hidden = torch.randn(4, source.normalized_size, generator=torch.Generator().manual_seed(0))
    logits = source.head(hidden[None].to(source.device))[0].float().cpu()
    expected = hidden @ rows.T
    return rows if bool((logits - expected).abs().max() <= 1e-3 * expected.abs().max()) else None


@torch.no_grad()
def may_exit(
    source: SourceModel, sample: Sample, config: TideConfig, layers: int, exits: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Computes the labels of one checkpoint, bool [n].

    Args:
        layers: layers run at the checkpoint.
        exits: normalized hidden states [n, D'] of the exit there.
        tokens: the full model's likeliest tokens, int64 [n].
    """
    last = sample.raw[source.num_layers]
    if config.label == "unchanged":
        return unchanged(source, exits, tokens)
    if config.label == "kl":
        return divergence(source, exits, normalize(source, last)) < config.kl_bound
    return torch.cosine_similarity(sample.raw[layers], last, dim=-1) > config.convergence_threshold


def blocks(source: SourceModel, tokens: int) -> Iterator[slice]:
    """Yields slices of 0 .. tokens, each so small that its logits fit into `LOGITS_BYTES`."""
    rows = max(1, min(LOGITS_BYTES // (4 * source.vocab_size), LOGITS_ROWS))
    yield from (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def _by_blocks(source: SourceModel, tokens: int, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(in_parallel(source, torch.no_grad()(compute), blocks(source, tokens))))
