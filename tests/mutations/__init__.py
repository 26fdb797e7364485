"""A mutation run: each rule of the distributed half is broken once, and that must be noticed.

`table.py` has the mutations as data, and `python -m tests.mutations` applies them one by one.
"""
