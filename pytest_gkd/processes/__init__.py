"""The operating system: process trees, what they create, their stacks, their end."""
