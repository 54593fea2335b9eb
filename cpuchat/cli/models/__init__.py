"""`cpuchat models`: find, download, check, compare and keep models."""
