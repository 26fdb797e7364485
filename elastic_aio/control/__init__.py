"""The control socket of an agent: what another process of the same user can ask of a job.

`aio-elastic ps`, `status`, `stop` and the other commands are its clients.
"""
