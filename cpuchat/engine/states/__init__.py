"""What of prompts was evaluated before, in memory and on disk."""
