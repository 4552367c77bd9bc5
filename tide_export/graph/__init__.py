"""Builds, reads and changes ONNX graphs, for every stage that makes them."""
