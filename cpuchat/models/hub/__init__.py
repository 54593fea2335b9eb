"""The Hugging Face hub: searching, listing a repository's models, reading headers from afar."""
