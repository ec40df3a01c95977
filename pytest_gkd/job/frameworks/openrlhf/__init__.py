"""Reads jobs of OpenRLHF."""
