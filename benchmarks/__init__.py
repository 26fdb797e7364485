"""elastic_aio side by side with torchrun and with what the machine itself allows."""
