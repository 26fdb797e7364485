"""Which store a job's nodes meet at, and which node serves it."""
