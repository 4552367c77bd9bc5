"""Runs a bundle's segment networks with PyTorch, on a GPU without TensorRT and on the CPU."""
