"""Extends `torch.onnx.export`: decompositions, functional forms of in-place operators, complex operators."""
