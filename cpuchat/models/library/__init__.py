"""The models on this machine: finding, resolving a name, verifying, deleting, and when each was used."""
