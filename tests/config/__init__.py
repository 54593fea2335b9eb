"""Tests of settings, presets and servers."""
