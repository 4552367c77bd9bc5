"""Extends `torch.onnx.export`: decompositions, in-place operators, constants, complex operators."""
