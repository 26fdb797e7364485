"""The agent runs one job on one host: a pure state machine decides, a driver performs."""
