"""The workers' output: planned, written to files by the workers, followed and shown."""
