"""Tests the server for other programs."""
