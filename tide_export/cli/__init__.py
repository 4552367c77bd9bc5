"""Reads command-line options, calls one function of the package and prints what it returns."""
