"""Exports the whole model once, as one graph with symbolic attention and markers."""
