"""Lowers segment networks for the CUDA provider of ONNX Runtime."""
