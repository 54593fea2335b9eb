"""What is wrong with this machine for inference, with evidence and what to do."""
