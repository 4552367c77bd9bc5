"""Loads the source model and finds its parts."""
