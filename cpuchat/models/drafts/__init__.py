"""Draft models: which ones fit a target, and which one is loaded beside it."""
