"""Replacements for layers with a recurrent state, by kind; `trace.recurrence` lists them."""
