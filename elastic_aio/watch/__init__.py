"""What watches workers: deadlines, timers, idleness, and what those are doing that miss them.

`agent.liveness` loads it when a job has a deadline or a timer, or when a worker reports.
"""
