"""Makes drafters of heads that others trained: EAGLE-3, DFlash, MTP, Gemma 4's assistants."""
