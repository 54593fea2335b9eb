"""Placement: which cores compute and where their memory is, decided once before a model is loaded."""
