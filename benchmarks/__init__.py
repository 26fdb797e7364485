"""elastic_aio beside torchrun and beside what the host itself allows."""
