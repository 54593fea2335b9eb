"""Suffix decoding, which drafts without a model."""
