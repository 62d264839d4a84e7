"""Whole programs, as people run them."""
