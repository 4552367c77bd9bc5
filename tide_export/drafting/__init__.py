"""Learned drafts: a small network that proposes what the model will write next, trained on the model's own answers."""
