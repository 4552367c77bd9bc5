"""A draft head as PyTorch code, whatever its layout, and how `export` gets one."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from tide_export.trace.attention.masks import Mask

CAUSAL = Mask("causal")


@dataclass(frozen=True, eq=False)
class DraftHead:
    """One decoder layer and an output head.

    Attributes:
        kind: "EAGLE-3" or "MTP".
        name: the folder or hub id that it was read from.
        step: embeddings of tokens [B, S, E], hidden states before them [B, S, D], their position_ids [B, S] -> logits
            [B, S, n], hidden states [B, S, D] for further drafts.
        model: which `step` runs, with attention and experts that can be replaced.
        tokens: the ids of the logits, ascending, int64 [n].
        mask: what its attention sees.
        layers: of the model, after which it reads hidden states, as they are concatenated; none: it reads what the
            model's head reads.
        fc: float32 [D, len(layers) * D], makes one of these; None where there are no `layers`.
    """

    kind: str
    name: str
    step: nn.Module
    model: PreTrainedModel
    tokens: NDArray[np.int64]
    mask: Mask = CAUSAL
    layers: tuple[int, ...] = ()
    fc: torch.Tensor | None = None
