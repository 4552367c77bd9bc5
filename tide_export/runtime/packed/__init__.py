"""Several sequences on ONNX Runtime's CPU: the tokens of all of them, concatenated, in one run per segment."""
