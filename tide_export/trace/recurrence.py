"""Makes layers that keep a recurrent state emit symbolic operators while they are traced.

Hybrid models mix attention with layers whose state has one size however long the text is. `transformers` computes most
of them by six functions, of which each architecture's module holds a copy, the others in a method or by a module of
PyTorch. While these are replaced, a layer emits

- `tide::TideCausalConv`: a convolution over each channel's last tokens, x [B, S, D] with weights [K, D] and a bias [D];
- `tide::TideRecurrence`: the state S [Dk, Dv] of every head takes each token in turn, and is read after it,

      S = decay * S;  delta = value, or beta * (value - key^T S);  S = S + key delta^T;  output = query^T S,

  of queries and keys [B, S, Hk, Dk], values [B, S, Hv, Dv], decays [B, S, Hv], [B, S, Hv, Dk] or [B, S, Hv, Dk, Dv],
  and, for the delta rule, beta [B, S, Hv]. Linear attention with gates (Yang et al. 2024, arXiv 2312.06635), the gated
  delta rule (arXiv 2412.06464), Kimi's delta attention (arXiv 2510.26692), both forms of Mamba (arXiv 2312.00752,
  2405.21060), lightning attention (arXiv 2401.04658), gated linear recurrent units (arXiv 2402.19427), RWKV's attention
  (arXiv 2305.13048) and xLSTM's matrix memory (arXiv 2405.04517) differ in no more than these.

`compose.states` connects the nodes to the states of sequences; cpp/ops has their kernels. `FUNCTIONS`, `METHODS` and
`MODULES` say what is replaced, and the modules of `recurrent_layers` by what.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel
from tide_export.trace.recurrent_layers.channel_sums import averages_of_values, scan_of_units
from tide_export.trace.recurrent_layers.convolutions import (
    causal_conv1d_fn,
    compressed_attention,
    convolved,
    dilated_convolution,
    earlier_tokens,
    sees_the_past,
    shifts_by_a_token,
)
from tide_export.trace.recurrent_layers.delta_rule import delta_rule
from tide_export.trace.recurrent_layers.linear_attention import lightning_attention, matrix_memory
from tide_export.trace.recurrent_layers.mamba import mamba2_chunk_scan, mamba_selective_scan
from tide_export.trace.recurrent_layers.operators import delayed, numbered_operators

STATEFUL_LAYERS = ("linear", "conv", "mamba", "recurrent", "hybrid")  # parts of the names of layer types in configs

# What is replaced. Functions of transformers, each a copy in the module of an architecture:
FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": causal_conv1d_fn,  # Kimi Linear, LFM2, Mamba 1 and 2 with their hybrids, Qwen3.5, Inkling ..
    "chunk_kimi_delta_attention": delta_rule,  # Kimi Linear, Bailing's hybrids
    "mamba2_chunk_scan": mamba2_chunk_scan,  # Mamba 2, Bamba, Falcon-H1, Granite 4 H, Nemotron-H, Zamba 2
    "mamba_selective_scan": mamba_selective_scan,  # Mamba, Falcon Mamba, Jamba, Zamba
    "rwkv_linear_attention": averages_of_values,  # RWKV
    "torch_chunk_gated_delta_rule": delta_rule,  # OLMo's hybrids, Qwen3-Next, Qwen3.5, Qwen 4
}
# Methods of its modules: what only this class has (a method, an attribute or a part), the method, its replacement.
METHODS: list[tuple[str, str, Callable]] = [
    ("_rnn_scan", "_rnn_scan", scan_of_units),  # RecurrentGemmaRglru
    ("decay_factors", "forward", lightning_attention),  # MiniMaxLightningAttention
    ("conv_qk_grouped", "forward", compressed_attention),  # ZayaCCAProjection
    ("chunkwise_kernel_fn", "forward", matrix_memory),  # xLSTMBackend
    ("_short_conv", "_short_conv", dilated_convolution),  # Qwen4ExpTextPLELayer
    ("_shift_right_ignore_eos", "_shift_right_ignore_eos", earlier_tokens),  # Qwen4ExpTextNGramEmbedding
]
# Modules of PyTorch: whether it is one, and what its forward becomes.
MODULES: list[tuple[Callable[[nn.Module], bool], Callable[[nn.Module], Callable]]] = [
    (sees_the_past, lambda module: partial(convolved, module)),  # of the convolutions that call no function
    (shifts_by_a_token, lambda _: partial(delayed, by=1)),  # RwkvSelfAttention and RwkvFeedForward
]


def keeps_state(source: SourceModel) -> bool:
    """Whether the model's state is more than keys and values."""
    return _stateful_kind(source) is not None or getattr(source.model, "_is_stateful", False)


def refuse_unknown_state(source: SourceModel) -> None:
    """Raises UnsupportedModelError if the model keeps a state that none of the operators computes."""
    if keeps_state(source) and not list(_replaced(source.model)):
        kind = _stateful_kind(source)
        layers = f" (layers of type {kind!r})" if kind is not None else ""
        raise UnsupportedModelError(
            f"{source.architecture} keeps a recurrent state{layers} that is neither a causal convolution, nor linear "
            "attention, nor a delta rule, nor Mamba's scan as transformers computes them, so it cannot be exported"
        )


def _stateful_kind(source: SourceModel) -> str | None:
    kinds = getattr(source.text_config, "layer_types", None) or ()
    return next((str(kind) for kind in kinds if any(name in str(kind) for name in STATEFUL_LAYERS)), None)


def _code(model: PreTrainedModel) -> set[ModuleType]:
    """The Python modules that define the model's parts."""
    return {sys.modules[type(module).__module__] for module in model.modules()}


@contextmanager
def symbolic_recurrence(model: PreTrainedModel) -> Iterator[None]:
    """While open, layers with a recurrent state emit the operators above instead of computing them."""
    replaced = list(_replaced(model))
    originals = [vars(owner).get(name) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        with numbered_operators():
            yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            if original is None:  # of a convolution, whose class has it
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replaced(model: PreTrainedModel) -> Iterator[tuple[Any, str, Callable]]:
    """Lists what computes the states of `model`: where it is, its name, and its replacement."""
    for code in _code(model):
        yield from ((code, name, FUNCTIONS[name]) for name in FUNCTIONS if name in vars(code))
    for kind, module in {type(module): module for module in model.modules()}.items():
        yield from (
            (kind, name, function)
            for mark, name, function in METHODS
            if mark in vars(kind) or mark in vars(module) or mark in module._modules
        )
    for module in model.modules():
        yield from ((module, "forward", forward(module)) for holds, forward in MODULES if holds(module))
