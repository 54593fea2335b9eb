"""Measures speed: a matrix of models and settings, in rounds on one load."""
