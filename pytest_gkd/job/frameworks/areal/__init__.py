"""AReaL: YAML with Hydra's overrides, dataclasses."""
