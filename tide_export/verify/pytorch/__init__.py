"""Runs segment networks in PyTorch, which judges those that ONNX Runtime does not run on the CPU: bfloat16."""
