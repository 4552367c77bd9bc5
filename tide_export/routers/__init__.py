"""Defines routers and lenses, and reads and writes the file that holds them."""
