"""The store of a job on Redis or Valkey."""
