"""The drafter in PyTorch; `routers.drafter_weights` has the formula.

`draft_steps` runs whole sequences for training, `rows` runs rows with a K/V cache as the runtime does. Step `k` of
`draft_steps` reads the hidden states that step `k - 1` proposed in place of the model's ("training-time test" of
EAGLE-3, Li et al. 2025, https://arxiv.org/abs/2503.01840), and attends only to rows of the model's hidden states and to
earlier steps of its chain.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from tide_export.routers.drafter_weights import EPSILON, HEAD_DIM, LIMIT, ROTARY_BASE, Shape

MATRIX_GAIN = 0.7  # initial standard deviation of a matrix, times the root of its inputs
RESIDUAL_GAIN = 0.3  # further factor for matrices that write to the residual stream
IDENTITY_GAIN = 0.7  # share of the identity in the initial `fuse`, which so begins with the hidden state it reads
FINAL_GAIN = 0.4  # initial final norm, times the root mean square of the model's hidden states
FIXED = ("center", "scale")  # measured, not trained
MASKED = -1e9


@dataclass(frozen=True)
class Cache:
    """Keys (after rotation) and values of earlier rows, float32 [kv_heads, rows, HEAD_DIM] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.keys.shape[1])

    def first(self, rows: int) -> "Cache":
        """Returns the cache of the first `rows` rows, without rejected drafts."""
        return Cache(self.keys[:, :rows], self.values[:, :rows])


@dataclass(frozen=True)
class Rows:
    """The result of running N rows.

    Attributes:
        logits: over the drafter's n tokens, float32 [N, n].
        hidden: read by the next draft in place of the model's, float32 [N, D].
        cache: the cache with these rows appended.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    cache: Cache


class DrafterNetwork(nn.Module):
    """A drafter: trained arrays are parameters; center, scale, head and bias are buffers."""

    center: torch.Tensor
    scale: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None
    embedding_norm: nn.Parameter
    state_norm: nn.Parameter
    attention_norm: nn.Parameter
    mlp_norm: nn.Parameter
    final_norm: nn.Parameter
    fuse: nn.Parameter
    qkv: nn.Parameter
    out: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self, shape: Shape, arrays: dict[str, torch.Tensor], head: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Takes the arrays of `Shape.arrays` and the rows of the model's head for the drafter's tokens."""
        super().__init__()
        self.shape = shape
        for name in shape.arrays:
            array = arrays[name].float().clone()
            if name in FIXED:
                self.register_buffer(name, array)
            else:
                self.register_parameter(name, nn.Parameter(array))
        self.register_buffer("head", head.float(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    @classmethod
    def untrained(
        cls, shape: Shape, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, seed: int
    ) -> "DrafterNetwork":
        """Returns a network to train.

        Args:
            hidden: a sample of the model's hidden states, [N, D], on which center and scale are measured.
            seed: seed of the initial weights.
        """
        generator = torch.Generator().manual_seed(seed)
        arrays = {name: torch.ones(size) for name, size in shape.arrays.items()}
        for name, size in shape.arrays.items():
            if len(size) == 2:
                gain = MATRIX_GAIN * (RESIDUAL_GAIN if name in ("out", "down") else 1.0)
                arrays[name] = torch.randn(size, generator=generator) * gain * size[1] ** -0.5
        state_part = arrays["fuse"][:, shape.embedding :]
        state_part *= (1 - IDENTITY_GAIN**2) ** 0.5
        state_part += IDENTITY_GAIN * torch.eye(shape.hidden)
        low, arrays["center"], high = torch.quantile(hidden.float(), torch.tensor([0.16, 0.5, 0.84]), dim=0)
        arrays["scale"] = (high - low) / 2 + 1e-3
        arrays["final_norm"] *= FINAL_GAIN * float(hidden.float().square().mean().sqrt())
        return cls(shape, arrays, head, bias)

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Returns the arrays of a `Drafter`."""
        return {name: getattr(self, name).detach().float().cpu().numpy().copy() for name in self.shape.arrays}

    def normalized_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the model's hidden states [..., D] centered, scaled and clipped, as the network reads them."""
        return ((hidden.float() - self.center) / self.scale).clamp(-LIMIT, LIMIT)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the logits of normalized outputs [..., D]."""
        return functional.linear(outputs, self.head, self.bias)

    def normalized_outputs(self, residual: torch.Tensor) -> torch.Tensor:
        """Applies the final norm to the residual stream [..., D] after the layer, for the head."""
        return _rms_norm(residual, self.final_norm)

    def draft_steps(self, embeddings: torch.Tensor, hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Yields the normalized outputs [B, S, D] of all rows of whole sequences, for each draft step.

        At step `k`, counted from 1, row `i` reads token `i + k` and proposes token `i + k + 1`, after `k - 1` drafts
        that follow the model's hidden state `i`. Rows whose tokens are beyond the sequence's end are meaningless.

        Args:
            embeddings: embeddings of all tokens including the first, [B, T, E], T <= S + 1.
            hidden: the model's hidden states, [B, S, D].
        """
        length = hidden.shape[1]
        needed = length + steps
        if embeddings.shape[1] < needed:
            embeddings = functional.pad(embeddings, (0, 0, 0, needed - embeddings.shape[1]))
        causal = torch.full((length, length), MASKED, device=hidden.device).triu(1)
        mask = causal.repeat(self.group, 1)
        features = self.normalized_hidden(hidden)
        context: Cache | None = None
        chain: list[Cache] = []  # K/V of the same row at earlier steps and this one
        for step in range(1, steps + 1):
            residual = self._fused(embeddings[:, step : step + length], features)
            queries, keys, values = self._heads(residual, step - 1)
            if context is None:
                context = Cache(keys, values)
            else:
                chain.append(Cache(keys, values))
            residual = self._finished(residual, self._chain_attention(queries, context, chain, mask))
            features = residual.clamp(-LIMIT, LIMIT)
            yield self.normalized_outputs(residual)

    @torch.no_grad()
    def rows(self, embeddings: torch.Tensor, hidden: torch.Tensor, cache: Cache | None = None) -> Rows:
        """Runs the next N rows after those of a cache, as the runtime does.

        Args:
            embeddings: embedding of token `i + 1` for each row `i`, [N, E].
            hidden: hidden state `i` for each row `i`, the model's or a draft's, [N, D].
            cache: K/V of the earlier rows; None: the rows start at 0.
        """
        past = 0 if cache is None else cache.rows
        residual = self._fused(embeddings[None], self.normalized_hidden(hidden)[None])
        queries, keys, values = self._heads(residual, past)
        if cache is not None:
            keys, values = torch.cat([cache.keys[None], keys], 2), torch.cat([cache.values[None], values], 2)
        count = len(hidden)
        mask = torch.full((count, past + count), MASKED, device=hidden.device).triu(1 + past).repeat(self.group, 1)
        residual = self._finished(residual, self._chain_attention(queries, Cache(keys, values), [], mask))[0]
        logits = self.logits(self.normalized_outputs(residual))
        return Rows(logits, residual * self.scale + self.center, Cache(keys[0], values[0]))

    @property
    def group(self) -> int:
        """The number of query heads per K/V head."""
        return self.shape.heads // self.shape.kv_heads

    def _fused(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        both = [_rms_norm(embeddings, self.embedding_norm), _rms_norm(features, self.state_norm)]
        return functional.linear(torch.cat(both, -1), self.fuse).float()

    def _heads(self, residual: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries [B, kv_heads, group * S, HEAD_DIM], keys and values [B, kv_heads, S, HEAD_DIM].

        Args:
            position: position of the first row.
        """
        batch, length = residual.shape[:2]
        wide, narrow = self.shape.heads * HEAD_DIM, self.shape.kv_heads * HEAD_DIM
        stacked = functional.linear(_rms_norm(residual, self.attention_norm), self.qkv)
        parts = [part.view(batch, length, -1, HEAD_DIM) for part in stacked.split([wide, narrow, narrow], -1)]
        cosine, sine = _rotation(position, length, residual.device)
        queries = (_rotated(parts[0].float(), cosine, sine) * HEAD_DIM**-0.5).transpose(1, 2)
        queries = queries.reshape(batch, self.shape.kv_heads, self.group * length, HEAD_DIM)
        return queries, _rotated(parts[1].float(), cosine, sine).transpose(1, 2), parts[2].float().transpose(1, 2)

    def _chain_attention(
        self, queries: torch.Tensor, context: Cache, chain: list[Cache], mask: torch.Tensor
    ) -> torch.Tensor:
        """Attends to the context under the mask and to the same row of each cache of the chain.

        Returns:
            The attended values, [B, S, heads * HEAD_DIM].
        """
        scores = torch.matmul(queries, context.keys.transpose(-1, -2)).float() + mask
        chain_scores = [
            (queries * entry.keys.repeat(1, 1, self.group, 1)).sum(-1, keepdim=True, dtype=torch.float32)
            for entry in chain
        ]
        shares = torch.cat([scores, *chain_scores], -1).softmax(-1)
        width = scores.shape[-1]
        mixed = torch.matmul(shares[..., :width], context.values).float()
        for number, entry in enumerate(chain):
            mixed = mixed + shares[..., width + number, None] * entry.values.repeat(1, 1, self.group, 1)
        batch, heads, rows, _ = mixed.shape
        length = rows // self.group
        mixed = mixed.reshape(batch, heads * self.group, length, HEAD_DIM)
        return mixed.transpose(1, 2).reshape(batch, length, heads * self.group * HEAD_DIM)

    def _finished(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual = residual + functional.linear(attended, self.out).float()
        gate, up = functional.linear(_rms_norm(residual, self.mlp_norm), self.gate_up).chunk(2, -1)
        return residual + functional.linear(functional.silu(gate) * up, self.down).float()


def _rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(values.float(), (values.shape[-1],), weight, EPSILON)


def _rotation(position: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines of S positions from `position`, [S, 1, HEAD_DIM] each."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angles = torch.arange(position, position + length, device=device).float()[:, None] * frequencies
    both = torch.cat([angles, angles], -1)[:, None]
    return both.cos(), both.sin()


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding, pairing the halves of each head, to heads [B, S, H, HEAD_DIM]."""
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-second, first], -1) * sine
