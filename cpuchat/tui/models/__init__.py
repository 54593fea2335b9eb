"""Models: on this machine, in the catalog and on Hugging Face; repositories, downloads, drafts, quantizing."""
