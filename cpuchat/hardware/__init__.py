"""What this machine has: CPUs, memory, and what this process may use of them."""
