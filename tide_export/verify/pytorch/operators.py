"""Computes the standard ONNX operators of segment networks in PyTorch.

Each function takes an operator's inputs and, as keywords, its attributes; other attributes are refused when a network
is opened. None waits for the device or reads from it, so a run can be recorded in a CUDA graph:
what must be known on the host (shapes, axes) comes as lists of integers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Ints = Sequence[int]

# By onnx.TensorProto.DataType.
DTYPES = {
    1: torch.float32, 3: torch.int8, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
    11: torch.float64, 16: torch.bfloat16, 17: torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """Describes how one operator is computed.

    Attributes:
        function: takes the inputs (None: absent) and attributes; returns a tensor or a tuple of tensors.
        on_host: indices of the inputs that it takes as lists of integers.
    """

    function: Callable[..., Any]
    on_host: tuple[int, ...] = ()


def gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis, size = axis % data.dim(), data.shape[axis]
    # On a GPU, an index out of range aborts the process; on the CPU it is reported.
    wrapped = indices % size if data.is_cuda else torch.where(indices < 0, indices + size, indices)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, wrapped.reshape(-1)).reshape(shape)


def gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return data.gather(axis, indices % data.shape[axis])


def gather_nd(data: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Gathers the slices at `indices` [*batch, *outer, n] of the n dimensions after the batch's."""
    batch, depth = data.shape[:batch_dims], indices.shape[-1]
    outer = indices.shape[batch_dims:-1]
    lead = [
        torch.arange(size, device=data.device).reshape([-1 if d == dim else 1 for d in range(batch_dims + len(outer))])
        for dim, size in enumerate(batch)
    ]
    return data[(*lead, *(indices[..., k] % data.shape[batch_dims + k] for k in range(depth)))]


def reshape(x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    return x.reshape([x.shape[dim] if size == 0 and not allowzero else size for dim, size in enumerate(shape)])


def expand(x: Tensor, shape: Ints) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


def slice_(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    index = [slice(None)] * x.dim()
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = 1 if steps is None else steps[number]
        if step < 1:
            raise ValueError("Slice with a negative step")
        index[number if axes is None else axes[number] % x.dim()] = slice(start, end, step)
    return x[tuple(index)]


def split(x: Tensor, sizes: Ints | None = None, *, axis: int = 0, num_outputs: int | None = None) -> tuple[Tensor, ...]:
    return x.split(list(sizes) if sizes is not None else -(-x.shape[axis] // (num_outputs or 1)), axis)


def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def tile(x: Tensor, repeats: Ints) -> Tensor:
    return x.repeat(*repeats)


def transpose(x: Tensor, *, perm: Ints | None = None) -> Tensor:
    return x.permute(tuple(reversed(range(x.dim()))) if perm is None else tuple(perm))


def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


def range_(start: Ints, limit: Ints, delta: Ints) -> Tensor:
    return torch.arange(start[0], limit[0], delta[0], dtype=torch.int64)


def constant_of_shape(shape: Ints, *, value: Tensor | None = None) -> Tensor:
    return torch.zeros(*shape) if value is None else value.expand(*shape).contiguous()


def pad(
    x: Tensor, pads: Ints, value: Tensor | None = None, axes: Ints | None = None, *, mode: str = "constant"
) -> Tensor:
    if mode != "constant":
        raise ValueError(f"Pad of mode {mode}")
    axes = range(x.dim()) if axes is None else [axis % x.dim() for axis in axes]
    before = dict(zip(axes, pads[: len(axes)], strict=True))
    after = dict(zip(axes, pads[len(axes) :], strict=True))
    amounts = [n for dim in reversed(range(x.dim())) for n in (before.get(dim, 0), after.get(dim, 0))]
    padded = F.pad(x, amounts)
    if value is None:
        return padded
    inside = F.pad(torch.ones_like(x, dtype=torch.bool), amounts)
    return torch.where(inside, padded, value.to(x.dtype))


def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(DTYPES[to])


def reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a reduction over the axes of the second input, by default over all."""

    def reduce(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        if not axes and noop_with_empty_axes:
            return x
        return function(x, tuple(axes or range(x.dim())), keepdim=bool(keepdims))

    return reduce


def top_k(x: Tensor, k: Ints, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(k[0], axis, bool(largest), bool(sorted))
    return values, indices


def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmax(axis, bool(keepdims))


def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Folds `function` from left to right over any number of inputs."""

    def fold(first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return fold


def divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def power(a: Tensor, b: Tensor) -> Tensor:
    return torch.pow(a, b).to(a.dtype)


def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    product = (a.T if transA else a) @ (b.T if transB else b)
    product = product if alpha == 1 else product * alpha
    return product if c is None else product + (c if beta == 1 else c * beta)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    size = x.shape[axis:]
    if scale.shape == size and scale.dtype == x.dtype:
        return F.rms_norm(x, size, scale, epsilon)  # sums and the product with the scale in float32
    return F.rms_norm(x.float(), size, None, epsilon).to(scale.dtype) * scale


def layer_normalization(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def rotary_embedding(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Computes RotaryEmbedding of x [B, H, S, D], or [B, S, H * D] with `num_heads`.

    The tables are [P, d / 2] and read at `positions` [B, S], or [B, S, d / 2].
    """
    flat = x.dim() == 3
    heads = x.unflatten(-1, (num_heads, -1)) if flat else x.transpose(1, 2)  # [B, S, H, D]
    if positions is not None:
        cosines, sines = gather(cosines, positions), gather(sines, positions)
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)  # [B, S, 1, d / 2]
    width = rotary_embedding_dim or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        parts = (first * cosines - second * sines, first * sines + second * cosines)
        turned = torch.stack(parts, -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cosines - second * sines, first * sines + second * cosines), -1)
    result = torch.cat((turned, rest), -1) if rest.shape[-1] else turned
    return result.flatten(-2) if flat else result.transpose(1, 2)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: int = 0,
    softmax_precision: int = 1,
) -> Tensor:
    """Computes Attention of query [B, H, S, D], keys and values [B, Hkv, C, D].

    The mask broadcasts to [B, H, S, C]. The H / Hkv query heads of a key head are treated as more queries, so that keys
    and values are not repeated.
    """
    batch, heads, tokens, width = query.shape
    groups = heads // keys.shape[1]
    if is_causal:
        raise ValueError("Attention that is causal without a mask")
    if groups > 1:
        query = query.reshape(batch, keys.shape[1], groups * tokens, width)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], keys.shape[1], -1, mask.shape[-1])
        elif mask is not None:
            mask = mask.expand(-1, groups, -1, -1).reshape(mask.shape[0], 1, -1, mask.shape[-1])
    attended = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    return attended.reshape(batch, heads, tokens, -1)


def scatter_into(buffer: Tensor, update: Tensor, starts: Tensor, axis: int = -2, mode: str = "linear") -> None:
    """Writes `update` [B, .., S, D] into `buffer` [B, .., C, D] from `starts` [B] on (TensorScatter)."""
    axis, size = axis % buffer.dim(), buffer.shape[axis]
    steps = torch.arange(update.shape[axis], device=buffer.device)
    index = starts.reshape(-1, 1) + steps
    if mode == "circular" or buffer.is_cuda:  # on a GPU, an index out of range aborts the process
        index = index % size
    shape = [1] * buffer.dim()
    shape[0], shape[axis] = index.shape
    buffer.scatter_(axis, index.reshape(shape).expand_as(update), update)


def tensor_scatter(buffer: Tensor, update: Tensor, starts: Tensor, *, axis: int = -2, mode: str = "linear") -> Tensor:
    result = buffer.clone()
    scatter_into(result, update, starts, axis, mode)
    return result


def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction != "none":
        raise ValueError(f"ScatterND with reduction {reduction}")
    return data.index_put(tuple(indices[..., k] % data.shape[k] for k in range(indices.shape[-1])), updates)


def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    index = indices % data.shape[axis]
    if reduction == "none":
        return data.scatter(axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return data.scatter_reduce(axis, index, updates, names[reduction])


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return x.softmax(axis)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return x.log_softmax(axis)


def concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis)


def quantize_linear(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Quantizes to 8-bit floating point, with one scale."""
    if zero.dtype != torch.float8_e4m3fn or scale.dim():
        raise ValueError(f"QuantizeLinear to {zero.dtype}")
    largest = torch.finfo(zero.dtype).max
    return (x / scale).clamp(-largest, largest).to(zero.dtype)


def dequantize_linear(x: Tensor, scale: Tensor, *, axis: int = 1, block_size: int = 0) -> Tensor:
    """Dequantizes with one scale, or with one scale per `block_size` numbers along `axis`."""
    if scale.dim() and not block_size:
        raise ValueError("DequantizeLinear by scales of an axis")
    return x.to(scale.dtype) * (scale.repeat_interleave(block_size, axis) if block_size else scale)


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and, "Ceil": torch.ceil, "Cos": torch.cos, "Div": divide,
    "Equal": torch.eq, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Identity": lambda x: x, "IsNaN": torch.isnan, "Less": torch.lt,
    "LessOrEqual": torch.le, "Log": torch.log, "MatMul": torch.matmul, "Max": variadic(torch.maximum),
    "Min": variadic(torch.minimum), "Mul": torch.mul, "Neg": torch.neg, "Not": torch.logical_not,
    "Or": torch.logical_or, "Pow": power, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Softplus": F.softplus,
    "Sqrt": torch.sqrt, "Sub": torch.sub, "Sum": variadic(torch.add), "Tanh": torch.tanh, "Where": torch.where,
    "Xor": torch.logical_xor,
}  # fmt: skip
OPERATORS: Mapping[str, Operator] = {
    **{name: Operator(function) for name, function in _ELEMENTWISE.items()},
    "ArgMax": Operator(arg_max),
    "Attention": Operator(attention),
    "Cast": Operator(cast),
    "Clip": Operator(clip),
    "Concat": Operator(concat),
    "ConstantOfShape": Operator(constant_of_shape, (0,)),
    "DequantizeLinear": Operator(dequantize_linear),
    "Expand": Operator(expand, (1,)),
    "Gather": Operator(gather),
    "GatherElements": Operator(gather_elements),
    "GatherND": Operator(gather_nd),
    "Gelu": Operator(gelu),
    "Gemm": Operator(gemm),
    "LayerNormalization": Operator(layer_normalization),
    "LogSoftmax": Operator(log_softmax),
    "Mod": Operator(modulo),
    "Pad": Operator(pad, (1, 3)),
    "QuantizeLinear": Operator(quantize_linear),
    "RMSNormalization": Operator(rms_normalization),
    "Range": Operator(range_, (0, 1, 2)),
    "ReduceMax": Operator(reduced(torch.amax), (1,)),
    "ReduceMean": Operator(reduced(torch.mean), (1,)),
    "ReduceMin": Operator(reduced(torch.amin), (1,)),
    "ReduceSum": Operator(reduced(torch.sum), (1,)),
    "Reshape": Operator(reshape, (1,)),
    "RotaryEmbedding": Operator(rotary_embedding),
    "ScatterElements": Operator(scatter_elements),
    "ScatterND": Operator(scatter_nd),
    "Shape": Operator(shape_of),
    "Slice": Operator(slice_, (1, 2, 3, 4)),
    "Softmax": Operator(softmax),
    "Split": Operator(split, (1,)),
    "Squeeze": Operator(squeeze, (1,)),
    "TensorScatter": Operator(tensor_scatter),
    "Tile": Operator(tile, (1,)),
    "TopK": Operator(top_k, (1,)),
    "Transpose": Operator(transpose),
    "Unsqueeze": Operator(unsqueeze, (1,)),
}
