"""The metrics that a run prints over time, and what is wrong with them."""
