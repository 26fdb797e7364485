"""The state of a job over HTTP: read-only pages for probes, Prometheus and people.

Everything that the pages show comes from the events of one agent.
"""
