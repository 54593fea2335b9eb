"""Draft models for the loaded model."""
