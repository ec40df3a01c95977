"""From-source glue: pytester, which the tests of the plugin use."""

from __future__ import annotations

pytest_plugins = ["pytester"]
