"""ONNX Runtime: sessions, their options and their memory."""
