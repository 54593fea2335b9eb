"""`cpuchat models`: find, download, verify, compare and delete models."""
