"""Shared by the benchmarks: graphs to compare, interleaved timing, and the cases of each engine."""
