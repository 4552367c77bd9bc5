"""Builds TensorRT engines from the segment networks of a bundle."""
