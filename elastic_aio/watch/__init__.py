"""The watch of workers: deadlines, timers, idleness, and the stacks of workers that miss them.

`agent.liveness` loads it when a job has a deadline or a timer, or when a worker reports.
"""
