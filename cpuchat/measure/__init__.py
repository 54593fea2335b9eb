"""Measuring speeds on a machine that other programs use too: loads, answers, rounds in turn."""
