"""What to run and how: frozen values, checked when they are made."""
