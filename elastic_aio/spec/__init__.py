"""Settings of a job: frozen values, checked when they are made."""
