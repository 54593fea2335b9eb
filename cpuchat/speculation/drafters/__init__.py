"""Drafters that need no model, and the interface of all."""
