"""Compiles an ONNX network to a list of PyTorch calls.

Functions are inlined, except those that the caller computes with a kernel. Values that depend only on shapes are
computed in the first run of each shape, on the host, and uploaded once: later runs of that shape copy nothing to the
device and wait for nothing, so they can be recorded in a CUDA graph.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import inliner, numpy_helper

from tide_export.errors import BundleError, ProviderError
from tide_export.verify.pytorch.operators import DTYPES, OPERATORS, Operator, scatter_into

Kernels = Mapping[tuple[str, str], Callable[..., Any]]  # by domain and operator, of inputs and attributes

# A value has up to three slots: the tensor on the device and, if it depends only on shapes, the tensor on the host and
# the list of its numbers.
DEVICE, HOST, LIST = "device", "host", "list"


@dataclass(frozen=True)
class Step:
    """Describes one call.

    Attributes:
        inputs, outputs: slots; -1 for an absent input.
        static: whether its results depend only on shapes.
        target: the output whose memory a TensorScatter writes to in place.
        free: slots that no later step reads.
    """

    call: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    static: bool = False
    target: str | None = None
    free: tuple[int, ...] = ()


class Program:
    """Compiles a network to steps on a device.

    Attributes:
        inputs, outputs: slots by name.
        steps: the calls in order.
        base: the value of every slot before a run; None: computed in the run.
        static: slots whose values depend only on shapes.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        where: str,
        kernels: Kernels | None = None,
    ) -> None:
        """Compiles `model`.

        Args:
            weights: its external initializers, on the device.
            where: its file, for messages.
            kernels: functions that compute some operators in place of the model's functions.

        Raises:
            ProviderError: the model has an operator or attribute that is not supported here.
        """
        self._device, self._where, self._kernels = device, where, kernels or {}
        graph = inliner.inline_selected_functions(model, list(self._kernels), exclude=True).graph
        self._slots: dict[tuple[str, str], int] = {}
        self._constants: dict[int, Any] = {}
        self._steps: list[Step] = []
        self._targets = dict(_in_place(graph))
        self.inputs = {value.name: self._slot(value.name) for value in graph.input}
        for initializer in graph.initializer:
            if initializer.name in weights:
                self._constants[self._slot(initializer.name)] = weights[initializer.name]
            else:
                self._add_constant(initializer.name, initializer)
        for node in graph.node:
            self._add(node)
        self.outputs = {value.name: self._needed(value.name, DEVICE) for value in graph.output}
        self._entries = [[_described(value) for value in values] for values in (graph.input, graph.output)]
        self.base = [self._constants.get(slot) for slot in range(len(self._slots))]
        self.static = {slot for step in self._steps if step.static for slot in step.outputs}
        self.steps = list(self._freeing())

    def get_inputs(self) -> list[SimpleNamespace]:
        """Returns name, type and shape of each input, as a session of ONNX Runtime does."""
        return self._entries[0]

    def get_outputs(self) -> list[SimpleNamespace]:
        """Returns name, type and shape of each output."""
        return self._entries[1]

    def _slot(self, name: str, kind: str = DEVICE) -> int:
        return self._slots.setdefault((name, kind), len(self._slots))

    def _add_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        """Adds a small constant, which may be needed on the host, on the device, or on both."""
        self._constants[self._slot(name, HOST)] = self._read(tensor)

    def _read(self, tensor: onnx.TensorProto) -> torch.Tensor:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:  # onnx would open the file that it names
            raise BundleError(f"'{self._where}' keeps {tensor.name} in a file of which nothing is read")
        array = numpy_helper.to_array(tensor)
        if tensor.data_type == onnx.TensorProto.INT4:
            return torch.from_numpy(array.astype(np.int8))
        return tensor_of(array, tensor.data_type, tensor.dims)

    def _is_static(self, name: str) -> bool:
        return (name, HOST) in self._slots

    def _needed(self, name: str, kind: str) -> int:
        """Returns the slot of a value in the form that a step takes; adds the conversion of static values."""
        if not self._is_static(name) or (name, kind) in self._slots:
            return self._slot(name, kind)
        source, slot = self._slot(name, HOST), self._slot(name, kind)
        bring = _numbers if kind == LIST else partial(torch.Tensor.to, device=self._device)
        if source in self._constants:
            self._constants[slot] = bring(self._constants[source])
        else:
            self._steps.append(Step(bring, (source,), (slot,), static=True))
        return slot

    def _add(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: self._attribute(node, attribute) for attribute in node.attribute}
        if node.op_type == "Constant" and not node.domain:
            self._add_constant(node.output[0], _constant(attributes))
            return
        kernel = self._kernels.get((node.domain, node.op_type))
        operator = OPERATORS.get(node.op_type) if not node.domain else None
        if kernel is not None:
            operator = Operator(kernel)
        if operator is None:
            raise self._unknown(node)
        present = [name for name in node.input if name]
        static = kernel is None and (node.op_type == "Shape" or (bool(present) and all(map(self._is_static, present))))
        inputs = []
        for number, name in enumerate(node.input):
            if not name:
                inputs.append(-1)
            elif number in operator.on_host:
                if not self._is_static(name):
                    raise self._unknown(node, f", whose {name} depends on data")
                inputs.append(self._needed(name, LIST))
            else:
                inputs.append(self._needed(name, HOST if static and self._is_static(name) else DEVICE))
        self._check_call(node, operator.function, len(inputs), attributes)
        target = self._targets.get(node.output[0]) if node.op_type == "TensorScatter" else None
        computing = scatter_into if target else operator.function
        call = partial(computing, **attributes) if attributes else computing
        outputs = tuple(self._slot(name, HOST if static else DEVICE) for name in node.output)
        self._steps.append(Step(call, tuple(inputs), outputs, static, target))

    def _attribute(self, node: onnx.NodeProto, attribute: onnx.AttributeProto) -> Any:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, onnx.TensorProto) and node.op_type != "Constant":
            return self._read(value).to(self._device)
        return value

    def _check_call(self, node: onnx.NodeProto, function: Any, inputs: int, attributes: Mapping[str, Any]) -> None:
        try:
            signature = inspect.signature(function)
        except ValueError:  # written in C
            known = not attributes
        else:
            try:
                signature.bind(*[None] * inputs, **attributes)
                known = True
            except TypeError:
                known = False
        if not known:
            raise self._unknown(node, f" with {', '.join(sorted(attributes))} and {inputs} inputs")

    def _unknown(self, node: onnx.NodeProto, how: str = "") -> ProviderError:
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        return ProviderError(f"'{self._where}' computes with {operator}{how}, which provider 'torch' does not know")

    def _freeing(self) -> Iterator[Step]:
        """Yields the steps, each with the slots that no later step reads."""
        kept = {*self.static, *self._constants, *self.outputs.values(), *self.inputs.values(), -1}
        last = {slot: number for number, step in enumerate(self._steps) for slot in (*step.inputs, *step.outputs)}
        for number, step in enumerate(self._steps):
            touched = dict.fromkeys((*step.inputs, *step.outputs))
            yield replace(step, free=tuple(slot for slot in touched if slot not in kept and last[slot] == number))


def tensor_of(array: np.ndarray, dtype: int, shape: Sequence[int]) -> torch.Tensor:
    """Copies `array` to a tensor of a TensorProto.DataType, whatever its NumPy dtype.

    4-bit integers become 8-bit ones; `array` holds them in pairs, the first in the low half of a byte.
    """
    if dtype == onnx.TensorProto.INT4:
        packed = array.reshape(-1).view(np.int8)
        pairs = np.stack([packed << 4 >> 4, packed >> 4], axis=-1)
        return torch.from_numpy(pairs.reshape(-1)[: math.prod(shape)].reshape(shape))
    flat = np.array(array, order="C").reshape(-1)
    return torch.from_numpy(flat.view(f"i{flat.itemsize}")).view(DTYPES[dtype]).reshape(tuple(shape))


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return tensor.reshape(-1).tolist()


def _constant(attributes: Mapping[str, Any]) -> onnx.TensorProto:
    ((name, value),) = attributes.items()
    if name == "value":
        return value
    return numpy_helper.from_array(np.array(value, np.int64 if name.startswith("value_int") else np.float32))


def _described(value: onnx.ValueInfoProto) -> SimpleNamespace:
    tensor = value.type.tensor_type
    dtype = str(DTYPES.get(tensor.elem_type, tensor.elem_type)).removeprefix("torch.")
    return SimpleNamespace(
        name=value.name, type=f"tensor({dtype})", shape=[dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    )


def _in_place(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yields results of TensorScatter that can be computed in a graph output's memory, and that output.

    These are chains of scatters from a graph input whose intermediate values have no other reader.
    """
    scatters = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "TensorScatter"}
    outputs = {value.name for value in graph.output}
    readers = [name for node in graph.node for name in node.input]
    for value in graph.input:
        chain, name = [], value.name
        while name in scatters and (name == value.name or readers.count(name) == 1):
            name = scatters[name]
            chain.append(name)
            if name in outputs:
                yield from ((result, name) for result in chain)
                break
