"""Checks values, writes files, formats text and shows progress, for every stage."""
