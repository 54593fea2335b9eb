"""What was measured on this machine, what is faster, and how fast its memory is read."""
