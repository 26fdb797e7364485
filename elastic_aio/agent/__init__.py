"""The agent: one job's life on one host.  A pure machine decides, a shell performs."""
