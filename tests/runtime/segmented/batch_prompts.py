"""Prompts of several lengths for batches of the tiny Llama; one is longer than its networks take in a run."""

from judge import TEXT

PROMPTS = [[7], [5, 9], TEXT, TEXT[3:20], [11] * 9]
