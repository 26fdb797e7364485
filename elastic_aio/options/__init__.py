"""The grammar of torchrun's options, and what those about many nodes mean."""
