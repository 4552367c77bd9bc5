"""Rewrites the portable graph for the operators of one engine."""
