"""Cuts the traced graph at its checkpoints and composes the step graph or the segment networks."""
