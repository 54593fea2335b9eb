"""Read bandwidth of the memory: the theoretical peak of the modules, and measurements."""
