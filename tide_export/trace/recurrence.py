"""Makes layers that keep a recurrent state emit symbolic operators while they are traced.

Hybrid models mix attention with layers whose state has one size however long the text is. `transformers` computes most
of them by six functions, of which each architecture's module holds a copy, the others in a method or by PyTorch's
convolution. While these are replaced, a layer emits

- `tide::TideCausalConv`: a convolution over each channel's last tokens, x [B, S, D] with weights [K, D] and a bias [D];
- `tide::TideRecurrence`: the state S [Dk, Dv] of every head takes each token in turn, and is read after it,

      S = decay * S;  delta = value, or beta * (value - key^T S);  S = S + key delta^T;  output = query^T S,

  of queries and keys [B, S, Hk, Dk], values [B, S, Hv, Dv], decays [B, S, Hv], [B, S, Hv, Dk] or [B, S, Hv, Dk, Dv],
  and, for the delta rule, beta [B, S, Hv]. Linear attention with gates (Yang et al. 2024, arXiv 2312.06635), the gated
  delta rule (arXiv 2412.06464), Kimi's delta attention (arXiv 2510.26692), both forms of Mamba (arXiv 2312.00752,
  2405.21060), lightning attention (arXiv 2401.04658), gated linear recurrent units (arXiv 2402.19427), RWKV's attention
  (arXiv 2305.13048) and xLSTM's matrix memory (arXiv 2405.04517) differ in no more than these.

`compose.states` connects the nodes to the states of sequences; cpp/ops has their kernels.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel
from tide_export.names.operators import OP_CAUSAL_CONV, OP_RECURRENCE
from tide_export.trace.running_layer import RUNNING
from tide_export.trace.symbolic import symbolic

NORM_EPSILON = 1e-6  # of the delta rule's queries and keys
LARGEST_KEY = 300.0  # of RWKV: sums of exp(key / 4) are finite in float32
STATEFUL_LAYERS = ("linear", "conv", "mamba", "recurrent", "hybrid")  # parts of the names of layer types in configs


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


class _Numbers:
    """Numbers the operators of each layer."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def attributes(self) -> dict[str, Any]:
        """Returns the layer that runs, and the next operator's number in it."""
        layer = RUNNING.get()
        assert layer is not None
        self.counts[layer] += 1
        return {"layer": layer, "number": self.counts[layer] - 1}


@contextmanager
def symbolic_recurrence(model: PreTrainedModel) -> Iterator[None]:
    """While open, layers with a recurrent state emit the operators above instead of computing them."""
    replaced = list(_replaced(model))
    originals = [vars(owner).get(name) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            if original is None:  # of a convolution, whose class has it
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replaced(model: PreTrainedModel) -> Iterator[tuple[Any, str, Callable]]:
    """Lists what computes the states of `model`: where it is, its name, and its replacement."""
    functions, methods, of_module = _replacements(_Numbers())
    for code in _code(model):
        yield from ((code, name, functions[name]) for name in functions if name in vars(code))
    for kind, module in {type(module): module for module in model.modules()}.items():
        yield from (
            (kind, name, function)
            for mark, name, function in methods
            if mark in vars(kind) or mark in vars(module) or mark in module._modules
        )
    for module in model.modules():
        if (function := of_module(module)) is not None:
            yield module, "forward", function


def _sees_the_past(conv: nn.Conv1d) -> bool:
    """Whether it convolves each channel causally.

    It pads by so much that the first outputs, one a token, are causal.
    """
    alone = conv.in_channels == conv.out_channels == conv.groups and conv.stride == conv.dilation == (1,)
    return alone and conv.kernel_size[0] > 1 and conv.padding == (conv.kernel_size[0] - 1,)


def _replacements(numbers: _Numbers) -> tuple[dict[str, Callable], list[tuple[str, str, Callable]], Callable]:
    """Returns the replacements by name.

    Functions of transformers are named by themselves, methods by one of their class, or a part of the module, and their
    own. A function gives the forward of a module of PyTorch: a convolution, or a shift by one token.
    """

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **_):
        tokens = hidden_states.transpose(1, 2)
        inputs = [tokens, weight.t(), *([] if bias is None else [bias])]
        attributes = numbers.attributes() | {"silu": int(activation in ("silu", "swish"))}
        output = symbolic(OP_CAUSAL_CONV, inputs, attributes, tokens.shape)
        if activation is not None and not attributes["silu"]:
            output = ACT2FN[activation](output)
        return output.transpose(1, 2)

    def recurrence(query, key, value, decay, beta=None) -> torch.Tensor:
        inputs = [tensor.float() for tensor in (query, key, value, decay, *([] if beta is None else [beta]))]
        return symbolic(OP_RECURRENCE, inputs, numbers.attributes(), value.shape)

    def no_state(output: torch.Tensor) -> torch.Tensor:
        """Stands for the state after the text, which callers keep and nothing reads."""
        return output.new_zeros(1)

    def delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
        output_dtype, (query, key) = query.dtype, (query.float(), key.float())
        scale = query.shape[-1] ** -0.5
        if use_qk_l2norm_in_kernel:
            query, key = _normalized(query, scale), _normalized(key)
        else:
            query = query * scale
        output = recurrence(query, key, value, g.float().exp(), beta)
        return output.to(output_dtype), no_state(output)

    def mamba2_chunk_scan(
        hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), **options
    ):  # fmt: skip
        dt = _step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
        hidden_states = hidden_states.float()
        output = recurrence(C, B, hidden_states * dt[..., None], (A.float() * dt).exp())
        output = output if D is None else output + D[..., None] * hidden_states
        return (output, no_state(output)) if options.get("return_final_states") else output

    def mamba_selective_scan(
        hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **options
    ):  # fmt: skip
        dt = _step_sizes(dt.transpose(1, 2), delta_bias, delta_softplus).float()  # [B, S, I]
        tokens = hidden_states.transpose(1, 2).float()
        decay = (A.float().t() * dt[:, :, None]).exp()  # [B, S, N, I]
        query, key = C.transpose(1, 2)[:, :, None], B.transpose(1, 2)[:, :, None]
        output = recurrence(query, key, (tokens * dt)[:, :, None], decay[:, :, None])[:, :, 0]
        output = output if D is None else output + D * tokens
        output = output.to(hidden_states.dtype).transpose(1, 2)
        output = output if z is None else output * functional.silu(z)
        return (output, no_state(output)) if options.get("return_last_state") else output

    def decayed_sums(values, decays):
        """Sums `values` [B, S, D] up to each token, of which each token's `decays` multiply those before."""
        one = values.new_ones((*values.shape[:2], 1, 1))
        return recurrence(one, one, values[:, :, None], decays[:, :, None, None])[:, :, 0]

    def scan_of_units(_self, hidden_states, recurrent_gate, reset, *_, **__):
        return decayed_sums(hidden_states, recurrent_gate * ~reset).to(hidden_states.dtype), None

    def lightning_attention(self, hidden_states, *_, **__):
        states = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (self.num_attention_heads, -1))
        decay = (-self.slope_rate.flatten()).exp().expand(states.shape[:3])
        query, key, value = states.chunk(3, dim=-1)
        output = recurrence(query, key, value, decay).to(hidden_states.dtype).flatten(2)
        return self.out_proj(self.output_gate(hidden_states).sigmoid() * self.norm(output)), None

    def delayed(tokens, by, before=None):
        """Returns the `tokens` [B, S, D] that came so many before each; `before` the first, zeros or [D]."""
        weight = torch.zeros((tokens.shape[-1], by + 1), device=tokens.device)
        weight[:, 0] = 1
        states = (tokens if before is None else tokens - before).transpose(1, 2)
        output = causal_conv1d_fn(states, weight).transpose(1, 2)
        return output if before is None else output + before

    def compressed_attention(self, hidden_states, *_, **__):
        """Computes queries, keys and values [B, S, heads, D] by convolutions of queries and keys (ZAYA)."""
        split = partial(torch.split, split_size_or_sections=[self.num_attention_heads, self.num_key_value_heads], dim=2)
        tokens = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states)], -1)
        window = torch.stack([*(delayed(tokens, by) for by in range(self.conv_kernel_size, 0, -1)), tokens], -1)
        mixed = self.conv_qk_grouped(self.conv_qk_depthwise(window.flatten(0, 1))).view(tokens.shape)
        query, key = split(tokens.unflatten(-1, (-1, self.head_dim)))
        query = (query + key.repeat_interleave(self.num_key_value_groups, 2)) * 0.5
        key = query.unflatten(2, (-1, self.num_key_value_groups)).mean(3)
        mixed_query, mixed_key = split(mixed.unflatten(-1, (-1, self.head_dim)))
        before = delayed(self.v_proj_delayed(hidden_states), 1, self.v_proj_delayed.bias)
        value = torch.cat([self.v_proj_current(hidden_states), before], -1).unflatten(-1, (-1, self.head_dim))
        return mixed_query + query, mixed_key + key, value

    def averages_of_values(time_decay, time_first, key, value, **_):
        """Averages values [B, S, D] by exp(key), which decays (RWKV).

        The token's own counts by exp(key + time_first).

        The sums stand over scale^4, where scale sums exp(key / 4): no less than the largest exp(key), and all finite.
        """
        root = (key.float().clamp(-LARGEST_KEY, LARGEST_KEY) / 4).exp()
        own = root * (time_first / 4).exp()
        root_before, value_before = delayed(torch.cat([root, value.float()], -1), 1).chunk(2, -1)
        scale = decayed_sums(root_before, (time_decay.exp() / -4).exp().expand(root.shape))
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # of no tokens
        share = root_before / scale
        weights, decays = (_fourth_power(one).repeat(1, 1, 2) for one in (share, 1 - share))
        terms = torch.cat([value_before, torch.ones_like(root)], -1) * weights
        numerator, denominator = decayed_sums(terms, decays).chunk(2, -1)
        largest = torch.maximum(scale, own)
        before, now = _fourth_power(scale / largest), _fourth_power(own / largest)
        average = (before * numerator + now * value) / (before * denominator + now)
        return average.to(value.dtype), None

    def matrix_memory(self, query, key, value, igate, fgate, **_):
        """Reads a sum of keys times values by a query (xLSTM).

        Sums of exp(igate) key value^T, over those of exp(igate) key, or over 1 where that is larger.

        transformers adds eps to a multiple of the divisor: the norm of each head after this takes out the difference.
        """
        query, key, value, igate, fgate = (one.transpose(1, 2) for one in (query, key, value, igate, fgate))
        values = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        weighted = key * igate.exp()[..., None]
        sums = recurrence(query * query.shape[-1] ** -0.5, weighted, values, fgate.sigmoid())
        output = sums[..., :-1] / (sums[..., -1:].abs().clamp(min=1) + self.config.eps)
        return output.transpose(1, 2), None

    def dilated_convolution(self, hidden_states, *_, **__):
        """Convolves tokens [B, S, D] some steps apart (Qwen 4)."""
        weight, (step,) = self.conv1d.weight.squeeze(1), self.conv1d.dilation
        weight = functional.pad(weight[..., None], (step - 1, 0)).flatten(1)[:, step - 1 :]
        return causal_conv1d_fn(hidden_states.transpose(1, 2), weight, self.conv1d.bias, "silu").transpose(1, 2)

    def earlier_tokens(self, token_ids, shift):
        """Returns ids [B, S] of so many tokens before, the end's after an end (Qwen 4).

        `token_ids`: of the text, after those that stand for what is before it.
        """
        end = float(self.eos_token_id)
        ids = (token_ids[:, self.context_len :, None].float() - end).expand(-1, -1, self.ngram_size)
        weight = torch.eye(self.ngram_size, device=ids.device).flip(1)
        now, *before = (causal_conv1d_fn(ids.transpose(1, 2), weight) + end).unbind(1)
        for by, earlier in enumerate(before[:shift]):
            now = torch.where(now == end, end, earlier) if by else earlier
        return now.to(token_ids.dtype)

    def convolve(conv, hidden_states):
        return causal_conv1d_fn(hidden_states, conv.weight.squeeze(1), conv.bias)

    def of_module(module: nn.Module) -> Callable | None:
        if isinstance(module, nn.Conv1d) and _sees_the_past(module):
            return partial(convolve, module)
        shifts = isinstance(module, nn.ZeroPad2d) and module.padding == (0, 0, 1, -1)
        return partial(delayed, by=1) if shifts else None

    functions: dict[str, Callable] = {
        "causal_conv1d_fn": causal_conv1d_fn,
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": mamba2_chunk_scan,
        "mamba_selective_scan": mamba_selective_scan,
        "rwkv_linear_attention": averages_of_values,
    }
    methods: list[tuple[str, str, Callable]]
    methods = [
        ("_rnn_scan", "_rnn_scan", scan_of_units),
        ("decay_factors", "forward", lightning_attention),
        ("conv_qk_grouped", "forward", compressed_attention),
        ("chunkwise_kernel_fn", "forward", matrix_memory),
        ("_short_conv", "_short_conv", dilated_convolution),
        ("_shift_right_ignore_eos", "_shift_right_ignore_eos", earlier_tokens),
    ]
    return functions, methods, of_module


def _normalized(states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`states` over their length, times `scale`: the norm by the root of the mean square is one operator."""
    width = states.shape[-1]
    weight = torch.full((width,), scale * width**-0.5, device=states.device)
    return functional.rms_norm(states, (width,), weight, NORM_EPSILON / width)


def _fourth_power(x: torch.Tensor) -> torch.Tensor:
    return x.square().square()


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt
