"""Runs a bundle; NumPy and one engine, no PyTorch."""
