"""Measures speed: a matrix of models and settings, with a protocol that noisy machines do not mislead."""
