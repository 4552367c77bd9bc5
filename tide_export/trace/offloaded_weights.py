"""Traces a model whose weights are on disk or on other devices, without loading them.

Used by `tracer` for models loaded with a device map. During the trace, a large offloaded weight is replaced by a
placeholder: uninitialized memory of its size, which takes no room as long as it is neither written nor read. Small
weights (norms, biases), which the exporter may compute with, and buffers are loaded. In the traced graph, each
placeholder then becomes a lazy tensor that reads the weight when it is written to the bundle: one at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from tide_export.errors import TraceError
from tide_export.graph.rewriting import WidenedTensor
from tide_export.model.quantized_modules import kept_in_16_bits
from tide_export.model.source import SourceModel
from tide_export.model.structure import offload_hooks

# Elements from which on a weight gets a placeholder. The exporter computes nothing with one as large: a transpose is a
# view (onnxscript.optimizer folds only Transpose of large inputs, and its other results end at 2**18 elements).
LARGE = 2**19


class Placeholders:
    """The weights that are replaced, found by the address of their placeholders."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.loaded: list[torch.Tensor] = []  # what is in memory, not replaced

    def find(self, address: int) -> tuple[str, int] | None:
        """The weight whose placeholder holds the element at `address`, and how many elements come before it."""
        for key, tensor in self.tensors.items():
            if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                return key, (address - tensor.data_ptr()) // tensor.element_size()
        return None

    def is_loaded(self, address: int) -> bool:
        return any(0 <= address - tensor.data_ptr() < max(tensor.nbytes, 1) for tensor in self.loaded)


@contextmanager
def placeholder_weights(source: SourceModel) -> Iterator[Placeholders]:
    """While open, every tensor of `source`'s model is on the CPU, large offloaded weights as placeholders.

    Accelerate's hooks, which would load the weights, are disabled meanwhile. A model on the CPU is not changed.
    """
    placeholders = Placeholders()
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def replace(holder: dict[str, Any], name: str, value: Any) -> None:
        replaced.append((holder, name, holder[name]))
        holder[name] = value

    tied = getattr(source.model, "all_tied_weights_keys", None) or {}
    parameters: dict[str, torch.nn.Parameter] = {}
    try:
        for path, module in source.model.named_modules():
            if offload_hooks(module) and "forward" in vars(module):
                replaced.append((vars(module), "forward", vars(module).pop("forward")))  # uncovers the class's
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                if weight.device.type == "cpu":
                    placeholders.loaded.append(weight)
                    continue
                key = f"{path}.{name}".lstrip(".")
                key = tied.get(key, key)
                if key not in parameters:
                    large = weight.numel() >= LARGE
                    tensor = torch.empty(weight.shape, dtype=torch.float32) if large else source.weight(key)
                    parameters[key] = torch.nn.Parameter(tensor, False)
                    if large:
                        placeholders.tensors[key] = parameters[key]
                    else:
                        placeholders.loaded.append(parameters[key])
                replace(module._parameters, name, parameters[key])
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "cpu":
                    replace(module._buffers, name, source.weight(f"{path}.{name}".lstrip(".")))
                if buffer is not None:
                    placeholders.loaded.append(module._buffers[name])
        yield placeholders
    finally:
        for holder, name, value in reversed(replaced):
            holder[name] = value


def read_when_written(traced: ir.Model, source: SourceModel, placeholders: Placeholders) -> None:
    """Replaces placeholders among the initializers of `traced` by tensors that read the weight on access.

    Views of placeholders too.

    Raises:
        TraceError: the exporter computed with a placeholder.
    """
    if not placeholders.tensors:
        return

    def read(key: str) -> torch.Tensor:
        return read_experts(key) if placeholders.tensors[key].dim() > 2 else source.weight(key).contiguous()

    @lru_cache(maxsize=1)  # the matrices of one layer's experts are slices of one tensor, one after the other
    def read_experts(key: str) -> torch.Tensor:
        return source.weight(key).contiguous()

    def lazy(name: str, key: str, array: np.ndarray, start: int) -> ir.LazyTensor:
        shape, strides = array.shape, [stride // array.itemsize for stride in array.strides]
        path, _, attribute = key.rpartition(".")
        if (half := kept_in_16_bits(source.model.get_submodule(path), attribute)) is not None:
            dtype = ml_dtypes.bfloat16 if half.dtype == torch.bfloat16 else np.float16
            bits = half.contiguous().view(torch.int16).as_strided(shape, strides, start).numpy()
            return WidenedTensor(name, bits.view(dtype))
        return ir.LazyTensor(
            lambda: ir.tensor(read(key).as_strided(shape, strides, start).numpy(), name=name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(shape),
            name=name,
        )

    for name, value in traced.graph.initializers.items():
        if value.const_value is None or value.const_value.size < LARGE:
            continue
        array = value.const_value.numpy()
        weight = placeholders.find(array.ctypes.data)
        if weight is not None:
            value.const_value = lazy(name, weight[0], array, weight[1])
        elif not placeholders.is_loaded(array.ctypes.data):
            raise TraceError(
                f"the exporter computed {name} {list(array.shape)} from a weight of {source.name} that is not in "
                "memory: export without a device map"
            )
