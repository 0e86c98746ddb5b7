"""Judges and benchmarks of Hindsight: what compares its results with those of other programs."""
