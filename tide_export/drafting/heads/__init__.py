"""Reads draft heads that others trained, EAGLE-3 and MTP, and makes drafters of them."""
