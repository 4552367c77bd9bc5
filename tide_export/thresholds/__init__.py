"""Resolves exit thresholds from options, and chooses them from measurements; NumPy alone."""
