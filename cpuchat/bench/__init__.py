"""Measures speed: a matrix of models and settings, with a protocol for noisy machines."""
