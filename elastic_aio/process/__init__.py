"""Worker processes: started, watched, and stopped with all their descendants."""
