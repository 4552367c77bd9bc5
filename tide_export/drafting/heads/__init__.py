"""Reads heads that others trained, EAGLE-3, MTP and Gemma 4's assistants, and makes drafters of them."""
