"""The programs that benchmarks run as workers, and those that stand for the physical limit."""
