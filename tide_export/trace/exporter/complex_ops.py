"""Registers translations of operators on complex numbers that the exporter lacks.

Llama 4 rotates queries and keys as complex numbers. The exporter represents a complex tensor as a real one with a last
dimension of two, and has most operators in that form.
"""

from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.registration import torch_op


@torch_op("aten::unsqueeze", trace_only=True, complex=True)
def aten_unsqueeze_complex(self, dim: int):
    return op.Unsqueeze(self, op.Constant(value_ints=[dim - 1 if dim < 0 else dim]))  # type: ignore[arg-type]
