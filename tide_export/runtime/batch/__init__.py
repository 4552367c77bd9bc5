"""Several sequences in one step, on ONNX Runtime's CPU: `Engine.generate` of a list of prompts."""
