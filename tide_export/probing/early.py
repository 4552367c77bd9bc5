"""Measures on a model's own answers how often an early exit draws another token, with a quick lens.

The quick lens is a ridge regression from the raw state at a checkpoint to that after the last layer, in closed form;
it is fitted to some of the answers and measured on the others, in turn. On SmolLM2-135M it agrees with full depth
about as often as a lens that `calibrate` fits to 100 times as many tokens (docs/guide/which-mode.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.calibration.labels import blocks, normalize, predict
from tide_export.calibration.parallel import in_parallel
from tide_export.common.progress import stage
from tide_export.model.source import SourceModel
from tide_export.probing.answers import Answers
from tide_export.tuning.measure import Measurement

FOLDS = 3
RIDGE = 0.1  # of the mean of the diagonal; .03 to .3 are alike
MIN_LOGARITHM = -80.0  # of a probability, so that its exponential is a float32


@dataclass(frozen=True)
class Early:
    """Exits at C checkpoints at each of n positions of the answers.

    Attributes:
        checkpoints: layers run at each.
        depth: layers of the model.
        document: int64 [n], the answer of each position.
        scores: float32 [n, C], the probability of the exit's likeliest token.
        early: int64 [n, C], the token that the exit draws with the noise that drew `full`, also as a draft.
        full: int64 [n], the answer's token, drawn at full depth.
        greedy_changed: share of positions where the exit's likeliest token is another one, by checkpoint.
    """

    checkpoints: tuple[int, ...]
    depth: int
    document: np.ndarray
    scores: np.ndarray
    early: np.ndarray
    full: np.ndarray
    greedy_changed: tuple[float, ...]

    @property
    def losses(self) -> np.ndarray:
        """Counts 1 where an exit draws another token than full depth, else 0, float64 [n, C]."""
        return (self.early != self.full[:, None]).astype(np.float64)

    @property
    def changed(self) -> tuple[float, ...]:
        """Changed tokens if every token exits at one checkpoint, by checkpoint."""
        return tuple(float(share) for share in self.losses.mean(axis=0))

    def recorded(self) -> tuple[Measurement, np.ndarray]:
        """Returns equally long beginnings of the longer answers, for `tuning.replay`, and which they are."""
        lengths = np.bincount(self.document)
        length = max(range(2, lengths.max() + 1), key=lambda n: n * int((lengths >= n).sum()))
        chosen = np.flatnonzero(lengths >= length)
        rows = np.stack([np.flatnonzero(self.document == answer)[:length] for answer in chosen])
        unread = np.zeros(self.early[rows].shape)  # what exits add to the loss: a replay asks for speed alone
        drafts, full = self.early[rows], self.full[rows]
        return Measurement(self.scores[rows], drafts, full, self.checkpoints, self.depth, unread), chosen


def measure_exits(source: SourceModel, answers: Answers, checkpoints: Sequence[int]) -> Early:
    """Runs the model over the answers and measures an exit at each of `checkpoints` (ascending)."""
    depth = source.num_layers
    texts = list(zip(answers.prompts, answers.answers, strict=True))

    def run(text: tuple[list[int], list[int]]) -> dict[int, torch.Tensor]:
        prompt, answer = text
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=source.device)
        states = source.raw_hidden(ids, [*checkpoints, depth])
        return {layers: state[0].float().cpu() for layers, state in states.items()}

    with stage("running the answers", total=float(len(texts))) as advance, torch.no_grad():
        parts = []
        for states in in_parallel(source, run, texts):
            parts.append(states)
            advance(1)
    document = torch.tensor([n for n, (prompt, answer) in enumerate(texts) for _ in [*prompt, *answer[:-1]]])
    measured = torch.tensor([at >= len(p) - 1 for p, a in texts for at in range(len(p) + len(a) - 1)])
    full = torch.tensor([token for answer in answers.answers for token in answer])
    raw = {layers: torch.cat([part.pop(layers) for part in parts]) for layers in (depth, *checkpoints)}
    last = raw.pop(depth)
    with stage("measuring early exits", total=float(len(full))) as advance, torch.no_grad():
        exits = [_translated(raw.pop(layers), last, document, measured) for layers in checkpoints]
        scores, early, changed = _draw(source, exits, last[measured], full, answers.temperature, advance)
    shares = tuple(float(share) for share in changed.mean(axis=0))
    found = scores, early, full.numpy()
    return Early(tuple(checkpoints), depth, document[measured].numpy(), *found, shares)


def _translated(
    state: torch.Tensor, last: torch.Tensor, document: torch.Tensor, measured: torch.Tensor
) -> torch.Tensor:
    """Returns the quick lens of the measured rows of `state` [n, D], fitted to the other answers' rows."""
    found = torch.empty_like(state)
    for fold in range(FOLDS):
        fitted, rows = document % FOLDS != fold, measured & (document % FOLDS == fold)
        if bool(fitted.any()):
            found[rows] = _ridge(state[fitted], last[fitted], state[rows])
        else:  # one answer
            found[rows] = state[rows]
    return found[measured]


def _ridge(states: torch.Tensor, last: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Fits what the deeper layers add to `states` [n, D], and adds it to `others`.

    Rows count by the inverse of their last state's norm, as the final norm divides by it.
    """
    mean, weight = states.mean(0), 1 / last.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    deviation = (states - mean).square().mean(0).sqrt().clamp_min(1e-6)
    inputs, added = (states - mean) / deviation * weight, last - states
    offset = (added * weight.square()).sum(0) / weight.square().sum()
    products = inputs.T @ inputs
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    matrix = torch.linalg.solve(products, inputs.T @ ((added - offset) * weight))
    return others + offset + (others - mean) / deviation @ matrix


def _draw(
    source: SourceModel,
    exits: Sequence[torch.Tensor],
    last: torch.Tensor,
    full: torch.Tensor,
    temperature: float,
    advance: Callable[[float], None],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws tokens of C exits with the noise that drew the answers.

    Args:
        exits: raw states [n, D] of each exit.
        last: raw states [n, D] after the last layer.
        full: the tokens drawn from them, int64 [n].

    Returns:
        Probabilities of the likeliest tokens float32, drawn tokens int64, and whether the likeliest ones are not full
        depth's bool, each [n, C].
    """
    shape = len(full), len(exits)
    scores, early, changed = np.empty(shape, np.float32), np.empty(shape, np.int64), np.empty(shape, bool)

    def part(rows: slice) -> int:
        with torch.no_grad():
            logits = predict(source, normalize(source, last[rows])).logits.cpu()
            noise = _noise(logits / temperature, full[rows], rows.start)
            for k, states in enumerate(exits):
                here = predict(source, normalize(source, states[rows])).logits.cpu()
                largest = here.amax(-1)
                scores[rows, k] = (largest - here.logsumexp(-1)).exp().numpy()
                early[rows, k] = (here / temperature).add_(noise).argmax(-1).numpy()
                changed[rows, k] = (here.gather(1, logits.argmax(-1, keepdim=True))[:, 0] < largest).numpy()
        return len(logits)

    for done in in_parallel(source, part, blocks(source, len(full))):
        advance(float(done))
    return scores, early, changed


def _noise(scaled: torch.Tensor, drawn: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns noise [n, V] with which `scaled` plus noise is largest at the tokens `drawn`.

    Args:
        scaled: logits / T [n, V].
        drawn: int64 [n].

    The largest sum is Gumbel noise, and the others are such noise below it (Maddison et al.,
    https://arxiv.org/abs/1411.0030).
    """
    generator = torch.Generator().manual_seed(seed)
    likely = scaled.log_softmax(-1).clamp_min(MIN_LOGARITHM)
    sums = torch.empty_like(likely).exponential_(generator=generator).log_().neg_().add_(likely)
    largest = torch.empty(len(likely), 1).exponential_(generator=generator).log_().neg_()
    sums = torch.logaddexp(-largest, -sums).neg_()
    return sums.scatter_(1, drawn[:, None], largest).sub_(likely)
