"""Measuring one way of running against another, and saying which is better."""
