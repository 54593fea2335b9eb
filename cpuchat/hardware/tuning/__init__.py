"""Tuning plans for machine settings that only root may change, and the scripts that apply and revert them.

cpuchat itself changes nothing and never runs sudo: it plans, saves a script that reverts, prints one that applies, and
checks afterwards what is in effect. Nothing survives a reboot.
"""
