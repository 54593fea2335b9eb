"""Measures two configurations against each other and decides which is faster."""
