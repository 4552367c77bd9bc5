"""Compares a bundle with the Hugging Face model and with TIDE's rule, token for token."""
