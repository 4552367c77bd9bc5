"""The main flow from a model to a bundle."""
