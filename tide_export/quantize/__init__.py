"""Rounds a model's matrices to 8 or 4 bits before any later stage sees them."""
