"""Runs the networks of one segment each: `state` decides which run, `lane` holds one sequence's memory, `device` and
`network` are what differs between the CPU and a GPU, ONNX Runtime and TensorRT."""
