"""The operating system: process trees, what they made, where they stand, their end."""
