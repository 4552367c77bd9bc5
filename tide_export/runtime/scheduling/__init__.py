"""Decodes requests that join, leave and are cancelled between steps."""
