"""Second stage: the whole model through `torch.onnx.export` once, with symbolic attention and checkpoint markers."""

from tide_export.trace.tracer import TracedModel, trace

__all__ = ["TracedModel", "trace"]
