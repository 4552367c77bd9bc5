"""The main flow from a model to a bundle, one stage a line."""
