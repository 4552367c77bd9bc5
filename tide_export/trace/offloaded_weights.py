"""Lets a model be traced whose weights are on disk or on other devices, without bringing them here.

Used by `tracer` for models that were loaded with a device map. While it is traced, a large weight is stood in for by
memory of its size that nobody writes to or reads, which takes no room; small ones (norms, biases), which the exporter
may compute with, and buffers are here as they are. In the trace, each stand-in is then replaced by a lazy tensor that
reads the weight from where it is, at the moment it is written to the bundle: one at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from tide_export.errors import TraceError
from tide_export.model.source import SourceModel
from tide_export.model.structure import offload_hooks

# Numbers in a weight that is left where it is. The exporter computes nothing with one as large: a transpose, which it
# takes, is a view (onnxscript.optimizer folds of large inputs Transpose alone, and its other results end at 2**18).
LARGE = 2**19


class StandIns:
    """The weights that are stood in for, by where their stand-ins lie."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: list[torch.Tensor] = []  # what is really here

    def find(self, address: int) -> tuple[str, int] | None:
        """The weight whose stand-in holds the number at `address`, and how many numbers lie before it."""
        for key, tensor in self.tensors.items():
            if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                return key, (address - tensor.data_ptr()) // tensor.element_size()
        return None

    def is_here(self, address: int) -> bool:
        return any(0 <= address - tensor.data_ptr() < max(tensor.nbytes, 1) for tensor in self.others)


@contextmanager
def absent_weights(source: SourceModel) -> Iterator[StandIns]:
    """While open, every tensor of `source`'s model is on the CPU, large weights that are elsewhere by stand-ins.

    Accelerate's hooks, which would bring weights here, do nothing meanwhile. Of a model on the CPU nothing is touched.
    """
    stand_ins = StandIns()
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def replace(holder: dict[str, Any], name: str, value: Any) -> None:
        replaced.append((holder, name, holder[name]))
        holder[name] = value

    tied = getattr(source.model, "all_tied_weights_keys", None) or {}
    made: dict[str, torch.nn.Parameter] = {}
    try:
        for path, module in source.model.named_modules():
            if offload_hooks(module) and "forward" in vars(module):
                replaced.append((vars(module), "forward", vars(module).pop("forward")))  # uncovers the class's own
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                if weight.device.type == "cpu":
                    stand_ins.others.append(weight)
                    continue
                key = f"{path}.{name}".lstrip(".")
                key = tied.get(key, key)
                if key not in made:
                    if weight.numel() >= LARGE:
                        made[key] = torch.nn.Parameter(torch.empty(weight.shape, dtype=torch.float32), False)
                        stand_ins.tensors[key] = made[key]
                    else:
                        made[key] = torch.nn.Parameter(source.weight(key), False)
                        stand_ins.others.append(made[key])
                replace(module._parameters, name, made[key])
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "cpu":
                    replace(module._buffers, name, source.weight(f"{path}.{name}".lstrip(".")))
                if buffer is not None:
                    stand_ins.others.append(module._buffers[name])
        yield stand_ins
    finally:
        for holder, name, value in reversed(replaced):
            holder[name] = value


def bring_weights(traced: ir.Model, source: SourceModel, stand_ins: StandIns) -> None:
    """Replaces every stand-in among the initializers of `traced`, and every view of one, by a tensor that reads the
    weight when it is asked.

    Raises:
        TraceError: the exporter computed with a stand-in.
    """
    if not stand_ins.tensors:
        return

    @lru_cache(maxsize=1)  # the matrices of one layer's experts are cut out of one tensor, one after the other
    def read(key: str) -> torch.Tensor:
        return source.weight(key).contiguous()

    def lazy(name: str, key: str, array: np.ndarray, start: int) -> ir.LazyTensor:
        shape, strides = array.shape, [stride // array.itemsize for stride in array.strides]
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
        found = stand_ins.find(array.ctypes.data)
        if found is not None:
            value.const_value = lazy(name, found[0], array, found[1])
        elif not stand_ins.is_here(array.ctypes.data):
            raise TraceError(
                f"the exporter computed {name} {list(array.shape)} from a weight of {source.name} that is not in "
                "memory: export without a device map"
            )
