"""Emits one symbolic attention operator per layer, whatever way the model computes attention."""
