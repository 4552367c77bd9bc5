"""Builds TensorRT plans from the segment networks of a bundle."""
