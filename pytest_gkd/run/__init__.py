"""A run of stages under pytest: workers, their deadlines, their outcomes."""
