"""Settings of the machine that only root may change: what they are, what to try, and scripts that change them.

The program changes nothing itself and never runs sudo. It plans, saves a script that puts everything back, prints one
that applies the plan, and looks afterwards at what is really in effect. Nothing here survives a reboot.
"""
