"""Worker processes: started, watched, and stopped with everything they left behind."""
