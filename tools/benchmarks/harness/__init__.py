"""Shared by the benchmarks: prompts in a chat template, and runtimes in processes of their own."""
