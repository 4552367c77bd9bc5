"""Predicts, before an export, how fast each mode would be for a model (`tide-export probe`)."""
