"""Live memory traffic and power from the counters that can be read on this machine."""
