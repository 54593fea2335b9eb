"""The list of downloads."""
