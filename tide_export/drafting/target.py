"""Takes from the source model what a drafter reads of it: embeddings, and the head's matrix and bias.

Logits are computed by that matrix alone. A constant factor of the logits (as of Granite and Cohere) is found by running
the head, and multiplied into the rows; a soft cap (as of Gemma 2) is left out: it keeps the order of the tokens and
changes probabilities little, and drafts are only proposals.
"""

from dataclasses import dataclass

import torch

from tide_export.errors import DraftError
from tide_export.model.source import SourceModel

PROBES = 4  # states that the factor is found with
PROBE_SIZE = 1e-2  # of their numbers: small, so that soft caps change nothing

SAME = 1e-3  # a factor this near to 1 is rounding
MAX_ERROR = 0.02  # of the products times the factor, relative to the logits


@dataclass(frozen=True, eq=False)
class Target:
    """What a drafter reads of its model.

    Attributes:
        embeddings: of all tokens, float32 [V, E].
        head: float32 [V, D].
        bias: float32 [V]; None: there is none.
        weights_sha256: of the model.
    """

    embeddings: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None
    weights_sha256: str

    @classmethod
    def of(cls, source: SourceModel) -> "Target":
        """Reads a model's.

        Raises:
            DraftError: its head or its embedding is not one matrix.
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
        """Returns the same on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return Target(self.embeddings.to(device), self.head.to(device), bias, self.weights_sha256)

    @property
    def vocabulary(self) -> int:
        return min(len(self.head), len(self.embeddings))


@torch.no_grad()
def _factor(source: SourceModel, head: torch.Tensor) -> float | None:
    """Returns the factor between the products of states with the head's rows and the model's logits; None: there is
    none, as where the head has other layers before its matrix (BERT)."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, PROBES, head.shape[1], generator=generator) * PROBE_SIZE
    both = torch.cat([states, torch.zeros_like(states)], 1).to(source.device)
    logits = source.head(both).float().cpu()[0]
    products = states[0] @ head.T
    differences = logits[:PROBES] - logits[PROBES:]
    factor = float((differences * products).sum() / products.square().sum())
    if float((differences - factor * products).norm()) > MAX_ERROR * float(differences.norm()):
        return None
    return 1.0 if abs(factor - 1) < SAME else factor
