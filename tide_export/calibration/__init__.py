"""Fits routers and lenses on text, and measures them."""
