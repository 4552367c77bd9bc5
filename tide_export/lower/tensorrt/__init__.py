"""Rewrites for TensorRT and TensorRT for RTX, one pass a file."""
