"""One repository of the Hugging Face hub."""
