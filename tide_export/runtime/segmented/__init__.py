"""Sequences on networks of one segment each: TensorRT engines, or ONNX Runtime on CUDA."""
