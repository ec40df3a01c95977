class Node:
    """Starts no process."""
