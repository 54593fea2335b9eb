"""On which NUMA nodes memory is, and how a process says where it wants it."""
