"""Measures how fast the monitor is, as ratios within one run."""
