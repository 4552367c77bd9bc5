"""What a router learns to predict: may this token leave at this checkpoint?

Two answers, used by `collect`. `agreement`, the default, is what a user means: the checkpoint's own head gives the
token the full model gives. `cosine` is TIDE's: the hidden state no longer turns, measured between raw states. (TIDE
compares with a state behind the final norm, so its labels mix turning with norming.)
"""

import torch

from tide_export.model import SourceModel

LOGITS_BYTES = 64 << 20  # logits made at a time; heads with scaling or soft capping hold a few copies of them


@torch.no_grad()
def top1(source: SourceModel, normed: torch.Tensor) -> torch.Tensor:
    """The token the model's head ranks first, int64 [n], for normed states [n, D'].

    Works through the tokens a few at a time, so that the logits of a large vocabulary never exist as a whole.
    """
    rows = max(1, LOGITS_BYTES // (4 * source.vocab_size))
    return torch.cat([source.head(part[None])[0].argmax(-1) for part in normed.split(rows)])


def agreement_labels(source: SourceModel, normed: torch.Tensor, full_top1: torch.Tensor) -> torch.Tensor:
    """bool [n]: the head on a checkpoint's normed states [n, D'] ranks the full model's token `full_top1` [n] first."""
    return top1(source, normed) == full_top1


def cosine_labels(raw: torch.Tensor, last: torch.Tensor, threshold: float) -> torch.Tensor:
    """bool [n]: cosine similarity of raw states [n, D] with the last layer's raw states [n, D] above `threshold`."""
    return torch.cosine_similarity(raw, last, dim=-1) > threshold
