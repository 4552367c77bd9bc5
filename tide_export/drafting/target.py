"""Extracts the tensors that a drafter shares with its model: embeddings, head matrix and bias.

A constant factor of the logits (Granite, Cohere) is measured by running the head and multiplied into the matrix. A
soft cap (Gemma 2) is omitted: it keeps the order of the tokens, and drafts are only proposals.
"""

from dataclasses import dataclass

import torch

from tide_export.errors import DraftError
from tide_export.model.source import SourceModel

PROBES = 4  # random hidden states to measure the factor with
PROBE_SIZE = 1e-2  # their standard deviation, so small that soft caps change nothing

SAME = 1e-3  # a factor this close to 1 is rounding
MAX_ERROR = 0.02  # maximum error of products times factor, relative to the logits


@dataclass(frozen=True, eq=False)
class Target:
    """The tensors of a model that its drafter reads.

    Attributes:
        embeddings: float32 [V, E].
        head: float32 [V, D].
        bias: float32 [V], or None.
        weights_sha256: hash of the model's weights.
    """

    embeddings: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None
    weights_sha256: str

    @classmethod
    def of(cls, source: SourceModel) -> "Target":
        """Reads the tensors of `source`.

        Raises:
            DraftError: its head or its embedding is not a single matrix.
        """
        head = source.head_rows()
        table = getattr(source.model.get_input_embeddings(), "weight", None)
        factor = None if head is None else _factor(source, head)
        if head is None or factor is None or not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise DraftError(
                f"model {source.name!r} has no single matrix as embedding and as head: no drafter can read it"
            )
        embeddings = table.detach().float().cpu().clone()
        bias = getattr(source.model.get_output_embeddings(), "bias", None)
        bias = bias.detach().float().cpu() * factor if isinstance(bias, torch.Tensor) else None
        return cls(embeddings[: len(head)], (head * factor).contiguous(), bias, source.weights_sha256)

    def to(self, device: torch.device) -> "Target":
        """Copies the tensors to `device`."""
        bias = None if self.bias is None else self.bias.to(device)
        return Target(self.embeddings.to(device), self.head.to(device), bias, self.weights_sha256)

    @property
    def vocabulary(self) -> int:
        return min(len(self.head), len(self.embeddings))


@torch.no_grad()
def _factor(source: SourceModel, head: torch.Tensor) -> float | None:
    """Returns the factor from `states @ head.T` to the model's logits.

    None if there is no such factor: the head has layers before its matrix (BERT).
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, PROBES, head.shape[1], generator=generator) * PROBE_SIZE
    both = torch.cat([hidden, torch.zeros_like(hidden)], 1).to(source.device)
    logits = source.head(both).float().cpu()[0]
    products = hidden[0] @ head.T
    differences = logits[:PROBES] - logits[PROBES:]
    factor = float((differences * products).sum() / products.square().sum())
    if float((differences - factor * products).norm()) > MAX_ERROR * float(differences.norm()):
        return None
    return 1.0 if abs(factor - 1) < SAME else factor
