"""The workers' output: planned, written to files by the workers, copied to the console."""
