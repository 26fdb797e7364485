"""CPUs, NUMA nodes and accelerators of a host, found without torch."""
