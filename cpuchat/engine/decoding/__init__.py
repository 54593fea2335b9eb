"""Prefill, decoding with and without drafts, and sampling."""
