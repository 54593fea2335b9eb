"""Models: what is on this machine, in the catalog and on the hub; repositories, downloads, drafts, quantizing."""
