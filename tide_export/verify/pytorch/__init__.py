"""Runs segment networks in PyTorch, to check those in bfloat16, which ONNX Runtime lacks on the CPU."""
