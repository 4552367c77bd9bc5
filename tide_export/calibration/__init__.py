"""Fits routers and lenses on text."""
