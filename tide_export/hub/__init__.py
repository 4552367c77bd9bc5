"""Uploads bundles to the Hugging Face hub, with a model card, and downloads them."""
