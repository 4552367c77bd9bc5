"""From a user's wishes and from measurements to exit thresholds; NumPy alone."""
