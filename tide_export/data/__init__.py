"""Reads documents and cuts them into sequences of tokens."""
