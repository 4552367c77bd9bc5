"""Rewrites for ONNX Runtime, one pass a file."""
