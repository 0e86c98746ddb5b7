"""Tests of the judges and benchmarks."""
