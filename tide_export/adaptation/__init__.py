"""Fine-tunes a model so that exits change few of its tokens: the stage before `calibrate`."""
