"""Draft models: which fit a target, what they would gain, and which is loaded beside it."""
