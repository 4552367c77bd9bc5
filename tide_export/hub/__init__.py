"""Uploads bundles to the Hugging Face hub, with a model card that holds their report, and downloads them."""
