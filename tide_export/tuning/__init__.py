"""Tunes a bundle: exit thresholds with a guarantee, and the fastest way to draft."""
