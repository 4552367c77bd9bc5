"""Rounds a model's matrices to 8 or 4 bits."""
