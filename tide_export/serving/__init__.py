"""Serves a bundle over HTTP, as OpenAI's API."""
