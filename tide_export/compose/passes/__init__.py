"""Rewrites of the traced graph before it is cut; standard ONNX in, standard ONNX out; one pass a file."""
