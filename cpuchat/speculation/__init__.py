"""Drafting tokens and choosing how many: pure algorithms over token ids and plain numbers."""
