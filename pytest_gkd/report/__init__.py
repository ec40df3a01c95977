"""The record of what a run found, and its renderings."""
