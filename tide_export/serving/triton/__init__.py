"""Serves a bundle as a model of NVIDIA Triton's python backend."""
