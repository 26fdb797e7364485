"""Side by side."""
