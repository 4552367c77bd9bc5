"""Holds the weights of a drafter, a decoder layer that proposes the next token as EAGLE does.

It reads the last token and the model's final hidden state, and proposes tokens of a reduced vocabulary (Li et al. 2024,
https://arxiv.org/abs/2401.15077). For a token with embedding x [E] after a position whose final hidden state is s [D]
(after the final norm), where rms(a) = a / sqrt(mean(a^2) + EPSILON):

    e = rms(x) * embedding_norm
    g = rms(clip((s - center) / scale, -LIMIT, LIMIT)) * state_norm
    z = fuse [e; g]
    z = z + out attention(qkv (rms(z) * attention_norm))      causal, rotary (ROTARY_BASE, halves), separate K/V
    z = z + down (silu(gate h) * up h),  h = rms(z) * mlp_norm
    logits = head (rms(z) * final_norm),  next s = z * scale + center

The next hidden state replaces the model's for a further draft. The first token of a sequence has no hidden state before
it and is
omitted: row i is token i + 1 with hidden state i, at position i. `head` holds the rows of the model's head for
    `tokens`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-5
LIMIT = 8.0
ROTARY_BASE = 100_000.0
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter; its attention heads have HEAD_DIM dimensions."""

    hidden: int  # D
    embedding: int  # E
    heads: int
    kv_heads: int
    mlp: int  # rows of gate and of up

    @classmethod
    def of(cls, hidden: int, embedding: int) -> "Shape":
        """Returns the shape for a model with hidden states and embeddings of these widths."""
        heads = max(1, hidden // HEAD_DIM)
        group = next(group for group in (4, 3, 2, 1) if heads % group == 0)
        return cls(hidden, embedding, heads, heads // group, max(64, round(hidden * 8 / 3 / 64) * 64))

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays without the head, matrices [out, in]; `qkv` and `gate_up` are stacked."""
        wide, narrow = self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        return {
            "center": (self.hidden,),
            "scale": (self.hidden,),
            "embedding_norm": (self.embedding,),
            "state_norm": (self.hidden,),
            "attention_norm": (self.hidden,),
            "mlp_norm": (self.hidden,),
            "final_norm": (self.hidden,),
            "fuse": (self.hidden, self.embedding + self.hidden),
            "qkv": (wide + 2 * narrow, self.hidden),
            "out": (self.hidden, wide),
            "gate_up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }


@dataclass(frozen=True, eq=False)
class Drafter:
    """Holds a trained drafter.

    Attributes:
        shape: its sizes.
        tokens: ids that it can propose, ascending, int64 [n].
        head: rows of the model's head for `tokens`, float32 [n, D].
        bias: the head's bias for `tokens`, float32 [n]; None: the head has none.
        arrays: float32, with the shapes of `Shape.arrays`.
        acceptance: share of drafts accepted on held-out answers, per interval of CONFIDENCES.
        weights_sha256: checksum of the weights of the model that it was trained for.
        provenance: record of its training and measurements, for `inspect`.
    """

    shape: Shape
    tokens: NDArray[np.int64]
    head: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    arrays: Mapping[str, NDArray[np.float32]]
    acceptance: tuple[float, ...]
    weights_sha256: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def matrices(self) -> dict[str, NDArray[np.float32]]:
        """All matrices [out, in], unstacked: fuse, q, k, v, out, gate, up, down and head."""
        wide, narrow = self.shape.heads * HEAD_DIM, self.shape.kv_heads * HEAD_DIM
        query, key, value = np.split(self.arrays["qkv"], [wide, wide + narrow])
        gate, up = np.split(self.arrays["gate_up"], 2)
        named = {"fuse": self.arrays["fuse"], "q": query, "k": key, "v": value, "out": self.arrays["out"]}
        return named | {"gate": gate, "up": up, "down": self.arrays["down"], "head": self.head}


# Lower ends of the intervals of confidence for which acceptance is counted. Confidence is the probability of the
# drafted token among `tokens` at the request's temperature.
CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
