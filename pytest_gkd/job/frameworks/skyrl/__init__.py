"""SkyRL: OmegaConf command lines, dataclasses."""
