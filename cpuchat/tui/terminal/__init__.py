"""Owns the terminal: takes it over, filters what is written to it, and restores it whatever happens."""
