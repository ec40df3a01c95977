"""ROLL: a YAML file composed by Hydra, read into dataclasses by dacite."""
