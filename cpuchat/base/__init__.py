"""Errors, files, places, untrusted text and child processes: what every room stands on."""
