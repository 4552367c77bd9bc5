"""A draft head as PyTorch code, whatever its layout, and how `export` gets one."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from tide_export.errors import DraftError
from tide_export.model.source import SourceModel
from tide_export.trace.attention.masks import Mask

CAUSAL = Mask("causal")
EMBEDDING_ERROR = 1e-2  # relative, of an embedding in 16 bits that is the model's


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
        fc_epsilon: of the root mean square that `fc` of the hidden states is divided by; None: it is not.
    """

    kind: str
    name: str
    step: nn.Module
    model: PreTrainedModel
    tokens: NDArray[np.int64]
    mask: Mask = CAUSAL
    layers: tuple[int, ...] = ()
    fc: torch.Tensor | None = None
    fc_epsilon: float | None = None


def check_embedding(table: torch.Tensor | None, what: str, source: SourceModel) -> None:
    """Checks that the embedding of a head, if it has one, is the model's, which is read in its place.

    Raises:
        DraftError: it is another one; the message begins with `what`.
    """
    if table is None:
        return
    module = source.model.get_input_embeddings()
    path = next(path for path, found in source.model.named_modules() if found is module)
    own = source.weight(f"{path}.weight")
    rows = min(len(own), len(table))
    if own.shape[1:] != table.shape[1:] or not torch.allclose(
        own[:rows], table[:rows].float(), rtol=EMBEDDING_ERROR, atol=EMBEDDING_ERROR * float(own.abs().max())
    ):
        raise DraftError(f"{what} has an embedding of its own, which is not the model's: such heads are not read")
