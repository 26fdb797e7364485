"""What a host has for its workers: CPUs, NUMA nodes and accelerators, without torch."""
