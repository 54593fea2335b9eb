"""Live memory traffic from whatever counter this machine lets us read."""
