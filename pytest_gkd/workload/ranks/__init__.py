"""Process groups of real ranks, and what went wrong in one."""
