"""NUMA placement of memory: reading it, and setting a process's policy."""
