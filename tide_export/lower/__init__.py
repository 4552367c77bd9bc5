"""Rewrites the portable graph for one engine's own operators."""
