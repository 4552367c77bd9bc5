"""A draft head as PyTorch code, whatever its layout, and how `export` gets one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """One decoder layer, or several without K/V, and an output head.

    Attributes:
        kind: "EAGLE-3", "MTP", "Gemma 4 assistant" or "DFlash".
        name: the folder or hub id that it was read from.
        step: embeddings of tokens [B, S, E], hidden states before them [B, S, D], their position_ids [B, S] -> logits
            [B, S, n], hidden states [B, S, D] for further drafts.
        model: which `step` runs, with attention and experts that can be replaced.
        tokens: the ids of the logits, ascending, int64 [n].
        masks: what the attention of each of its layers sees.
        layers: of the model, after which it reads hidden states, as they are concatenated; none: it reads what the
            model's head reads.
        fc: float32 [D, len(layers) * D], makes one of these; None where there are no `layers`.
        fc_epsilon: of the root mean square that `fc` of the hidden states is divided by; None: it is not.
        kv_layers: of the model, whose keys and values each of its layers reads; none: it has its own.
        block_size: tokens of a block, of which it drafts all but the first in one run; 0: it drafts one token. Then
            `step` takes the last rows of sequences too, and gives logits alone, as `DrafterPieces.attend`.
    """

    kind: str
    name: str
    step: nn.Module
    model: PreTrainedModel
    tokens: NDArray[np.int64]
    masks: tuple[Mask, ...] = (CAUSAL,)
    layers: tuple[int, ...] = ()
    fc: torch.Tensor | None = None
    fc_epsilon: float | None = None
    kv_layers: tuple[int, ...] = ()
    block_size: int = 0

    @property
    def width(self) -> int:
        """D and E, the widths of hidden states and embeddings."""
        config = self.model.config
        return int(getattr(config, "backbone_hidden_size", None) or config.hidden_size)


def check_loaded(module: nn.Module, info: Mapping[str, Any], what: str, shared: tuple[str, ...] = ()) -> None:
    """Checks that every weight of `module` was read, with its shape and without NaN.

    Args:
        info: what transformers says of the loading.
        shared: how names of weights begin that are the model's.

    Raises:
        DraftError: one was not; the message begins with `what`.
    """
    missing = (key for key in sorted(info["missing_keys"]) if not key.startswith(shared))
    problems = [f"it has no usable weight for {key}" for key in missing]
    problems += [f"weight {key} is {list(found)}, not {list(size)}" for key, found, size in info["mismatched_keys"]]
    problems += [f"nothing is known of its weight {key}" for key in sorted(info["unexpected_keys"])]
    problems = problems or [
        f"weight {key} holds NaN or infinity"
        for key, value in module.named_parameters()
        if not bool(torch.isfinite(value).all())
    ]
    for problem in problems:
        raise DraftError(f"{what} cannot be read: {problem}: download it again")


def load_step(step: PreTrainedModel, weights: Mapping[str, torch.Tensor], name: str, layout: str) -> None:
    """Loads `weights`, which must be those of `step` and without NaN.

    Raises:
        DraftError: one is not; `layout` is what the head then is not.
    """
    expected = step.state_dict()
    for key in sorted(expected.keys() ^ weights.keys()):
        raise DraftError(
            f"draft head {name!r} has {'no' if key in expected else 'an unknown'} weight {key}: it is no {layout} head "
            "of a layout that is known"
        )
    for key, value in expected.items():
        if weights[key].shape != value.shape:
            raise DraftError(
                f"draft head {name!r}: weight {key} is {list(weights[key].shape)}, not {list(value.shape)} as its "
                "config.json says: download it again"
            )
        if not bool(torch.isfinite(weights[key]).all()):
            raise DraftError(f"draft head {name!r}: weight {key} holds NaN or infinity")
    step.load_state_dict({key: value.float() for key, value in weights.items()})
    step.eval().requires_grad_(False)


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
