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

    def draft_steps(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:
        """Yields the normalized outputs [B, R, D] of some rows of whole sequences, for each draft step.

        At step `k`, counted from 1, row `i` reads token `i + k` and proposes token `i + k + 1`, after `k - 1` drafts
        that follow the model's hidden state `i`. Rows whose tokens are beyond the sequence's end are meaningless. Of
        the other rows, only keys and values are computed.

        Args:
            embeddings: embeddings of all tokens including the first, [B, T, E], T <= S + 1.
            hidden: the model's hidden states, [B, S, D].
            rows: the rows to draft after, int64 [B, R].
        """
        length = hidden.shape[1]
        needed = length + steps
        if embeddings.shape[1] < needed:
            embeddings = functional.pad(embeddings, (0, 0, 0, needed - embeddings.shape[1]))
        everywhere = torch.arange(length, device=hidden.device)
        mask = torch.where(everywhere > rows[..., None], MASKED, 0.0)
        sequences = torch.arange(len(rows), device=hidden.device)[:, None]
        residual = self._fused(embeddings[:, 1 : 1 + length], self.normalized_hidden(hidden))
        context = self._keys_values(residual, everywhere)
        residual = residual[sequences, rows]
        chain: list[Cache] = []  # K/V of the same row at earlier steps and this one
        for step in range(1, steps + 1):
            if step > 1:
                residual = self._fused(embeddings[sequences, rows + step], residual.clamp(-LIMIT, LIMIT))
                chain.append(self._keys_values(residual, rows + step - 1))
            queries = self._queries(residual, rows + step - 1)
            residual = self._finished(residual, self._chain_attention(queries, context, chain, mask))
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
        count = len(hidden)
        positions = torch.arange(past, past + count, device=hidden.device)
        residual = self._fused(embeddings[None], self.normalized_hidden(hidden)[None])
        new = self._keys_values(residual, positions)
        keys, values = new.keys, new.values
        if cache is not None:
            keys, values = torch.cat([cache.keys[None], keys], 2), torch.cat([cache.values[None], values], 2)
        mask = torch.full((1, count, past + count), MASKED, device=hidden.device).triu(1 + past)
        attended = self._chain_attention(self._queries(residual, positions), Cache(keys, values), [], mask)
        residual = self._finished(residual, attended)[0]
        logits = self.logits(self.normalized_outputs(residual))
        return Rows(logits, residual * self.scale + self.center, Cache(keys[0], values[0]))

    def _fused(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        both = [_rms_norm(embeddings, self.embedding_norm), _rms_norm(features, self.state_norm)]
        return functional.linear(torch.cat(both, -1), self.fuse).float()

    def _queries(self, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the queries of rows [B, R, D], scaled, [B, kv_heads, heads / kv_heads, R, HEAD_DIM].

        Args:
            positions: the rows' positions, int64 [R] or [B, R].
        """
        wide = self.shape.heads * HEAD_DIM
        heads = functional.linear(_rms_norm(residual, self.attention_norm), self.qkv[:wide]).float()
        heads = _rotated(heads.unflatten(-1, (-1, HEAD_DIM)), positions) * HEAD_DIM**-0.5
        return heads.transpose(1, 2).unflatten(1, (self.shape.kv_heads, -1))

    def _keys_values(self, residual: torch.Tensor, positions: torch.Tensor) -> Cache:
        """Returns keys and values of rows [B, R, D], [B, kv_heads, R, HEAD_DIM] each.

        Args:
            positions: as in `_queries`.
        """
        wide = self.shape.heads * HEAD_DIM
        both = functional.linear(_rms_norm(residual, self.attention_norm), self.qkv[wide:]).float()
        keys, values = both.unflatten(-1, (-1, HEAD_DIM)).chunk(2, -2)
        return Cache(_rotated(keys, positions).transpose(1, 2), values.transpose(1, 2))

    def _chain_attention(
        self, queries: torch.Tensor, context: Cache, chain: list[Cache], mask: torch.Tensor
    ) -> torch.Tensor:
        """Attends to the context of S rows, and to the same row of each cache of the chain.

        Args:
            mask: added to the scores of the context, [B, R, S].

        Returns:
            The attended values, [B, R, heads * HEAD_DIM].
        """
        group = queries.shape[2]
        scores = torch.matmul(queries.flatten(2, 3), context.keys.transpose(-1, -2)).float()
        scores = scores.unflatten(2, (group, -1)) + mask[:, None, None]
        chain_scores = [
            (queries * entry.keys[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for entry in chain
        ]
        shares = torch.cat([scores, *chain_scores], -1).softmax(-1)
        width = scores.shape[-1]
        mixed = torch.matmul(shares[..., :width].flatten(2, 3), context.values).float().unflatten(2, (group, -1))
        for number, entry in enumerate(chain):
            mixed = mixed + shares[..., width + number, None] * entry.values[:, :, None]
        return mixed.flatten(1, 2).transpose(1, 2).flatten(2)

    def _finished(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual = residual + functional.linear(attended, self.out).float()
        gate, up = functional.linear(_rms_norm(residual, self.mlp_norm), self.gate_up).chunk(2, -1)
        return residual + functional.linear(functional.silu(gate) * up, self.down).float()


def _rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(values.float(), (values.shape[-1],), weight, EPSILON)


def _rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding, pairing the halves of each head, to heads [B, R, H, HEAD_DIM].

    Args:
        positions: int64 [R] or [B, R].
    """
    pairs = torch.arange(0, HEAD_DIM, 2, device=heads.device).float() / HEAD_DIM
    angles = (positions[..., None].float() * ROTARY_BASE**-pairs).repeat(*[1] * positions.dim(), 2)[..., None, :]
    first, second = heads.chunk(2, -1)
    return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
