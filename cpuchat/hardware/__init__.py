"""The hardware of this machine: CPUs, memory, and what this process may use of them."""
