"""Deliberate faults, one module for each file of pytest_gkd/faults.

Each function takes a ``Site`` and causes the fault itself: it truncates the file, kills
the process, lowers the limit. None raises what the stage is to find. The fault's
``how`` says what it does; a docstring here only adds to that.
"""
