"""The settings screen and its form."""
