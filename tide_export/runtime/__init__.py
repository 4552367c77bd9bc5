"""Runs a bundle: `engine` generates, `session` holds ONNX Runtime, `state` one sequence, `sampling` picks tokens.

Everything here imports with numpy alone; ONNX Runtime is loaded when the first bundle is.
"""
