"""Faults that are committed on purpose, one module for each file of pytest_gkd/faults.

Each function there takes a ``Site`` and does the thing itself: it truncates the file,
kills the process, takes the limit away. None raises what the stage is to find. What it
does stands there as the fault's ``how``; a docstring here says what that does not.
"""
