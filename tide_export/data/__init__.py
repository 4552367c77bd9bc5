"""Documents, cut into sequences of tokens."""
