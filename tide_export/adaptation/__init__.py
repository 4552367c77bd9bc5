"""Trains a user's own model so that its early layers agree with its last one: the stage before `calibrate`."""
