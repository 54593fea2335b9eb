"""The Hugging Face Hub: searching, listing a repository's models, reading headers by range requests."""
