"""Fixtures that the stages share."""

from __future__ import annotations
