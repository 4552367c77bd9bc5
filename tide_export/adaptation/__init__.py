"""Fine-tunes a model so that its early layers agree with its last one: the stage before `calibrate`."""
