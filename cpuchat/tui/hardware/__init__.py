"""The hardware screen: topology, cores in use, memory policy, bandwidth."""
