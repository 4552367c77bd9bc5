"""Says which operators have a CUDA kernel in ONNX Runtime, from the list in `kernels.txt`.

`tools/cuda_kernels.py` wrote it by asking onnxruntime-gpu of the version in its first line. ONNX Runtime runs a node
without a kernel on the CPU, between two copies and with a wait, so such a node is an error here.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import onnx.defs
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.compose.segments import OPSET
from tide_export.errors import UnsupportedModelError
from tide_export.names.operators import DOMAIN

KERNELS = Path(__file__).with_name("kernels.txt")
NAMES = {ir.DataType.FLOAT: "float"}  # of types, where they are not ONNX's in lower case
FOLDED = "Constant"  # which ONNX Runtime folds


class Kernels(NamedTuple):
    """The kernels by operator and domain, each with its versions and the types of its constraints.

    Attributes:
        inputs: the type constraint of each input, of operators that are not ONNX's.
    """

    version: str  # of onnxruntime-gpu
    inputs: Mapping[tuple[str, str], list[str]]
    rows: Mapping[tuple[str, str], list[tuple[range, Mapping[str, set[str]]]]]


@functools.cache
def kernels() -> Kernels:
    head, *lines = KERNELS.read_text(encoding="utf-8").splitlines()
    inputs: dict[tuple[str, str], list[str]] = {}
    rows: dict[tuple[str, str], list[tuple[range, Mapping[str, set[str]]]]] = {}
    for operator, domain, first, *rest in map(str.split, lines):
        name = operator, domain.strip("-")
        if first == "inputs":
            inputs[name] = rest
            continue
        last, *constraints = rest
        # A kernel without a last version is for its first alone: of the next, ONNX may have changed the operator.
        versions = range(int(first), int(first if last == "-" else last) + 1)
        split = (constraint.split("=") for constraint in constraints)
        rows.setdefault(name, []).append((versions, {key: set(types.split(",")) for key, types in split}))
    return Kernels(head.split(",")[0].split()[-1], inputs, rows)


def check_kernels(models: Mapping[str, ir.Model]) -> None:
    """Checks that every node of the networks has a CUDA kernel.

    Raises:
        UnsupportedModelError: naming the first that has none.
    """
    for name, model in models.items():
        typed = model.clone()
        common_passes.ShapeInferencePass()(typed)  # what was inlined has no types
        check_nodes(typed.graph.all_nodes(), f"network {name}", {})


def check_nodes(nodes: Iterable[ir.Node], where: str, becomes: Mapping[ir.DataType, ir.DataType]) -> None:
    """Checks standard operators and ONNX Runtime's among `nodes`.

    Args:
        where: they are, for the message.
        becomes: types that will be others.

    Raises:
        UnsupportedModelError: naming the first that has no CUDA kernel.
    """
    for node in nodes:
        if node.domain == DOMAIN or node.op_type == FOLDED:
            continue
        read = [None if value is None else value.dtype for value in node.inputs]
        types = [None if dtype is None else becomes.get(dtype, dtype) for dtype in read]
        if not _has_kernel(node, types):
            shown = sorted({_shown(dtype) for dtype in types if dtype is not None})
            operator = f"{node.domain}::{node.op_type}" if node.domain else f"{node.op_type}"
            raise UnsupportedModelError(
                f"the model computes with {operator} of {', '.join(shown)} (in its {where}), for which onnxruntime-gpu "
                f"{kernels().version} has no CUDA kernel: use target onnxruntime"
            )


def _has_kernel(node: ir.Node, types: list[ir.DataType | None]) -> bool:
    version, constraints = 1, kernels().inputs.get((node.op_type, node.domain), [])
    if not node.domain:
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        version, constraints = schema.since_version, [item.type_str for item in schema.inputs]
    constraints = [*constraints, *constraints[-1:] * len(types)]  # of variadic inputs
    given = [(name, _shown(dtype)) for name, dtype in zip(constraints, types, strict=False) if dtype is not None]
    return any(
        version in versions and all(dtype in allowed.get(name, {dtype}) for name, dtype in given)
        for versions, allowed in kernels().rows.get((node.op_type, node.domain), [])
    )


def _shown(dtype: ir.DataType) -> str:
    return NAMES.get(dtype, dtype.name.lower())
