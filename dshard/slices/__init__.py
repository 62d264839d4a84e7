"""Weights that are gathered, used and reduced in slices."""
