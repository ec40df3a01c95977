"""Run at startup by every Python that a stage starts (docs.python.org, module site).

Makes the process report its import time, then gives way to the sitecustomize module
that would have been found without this one. The interpreter may be a different one,
without this package, and its startup must not suffer.
"""

import sys

_HERE = __file__.rpartition("/")[0]

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
try:
    from pytest_gkd.processes.import_clock import tell_in_files

    tell_in_files()
except (ImportError, SyntaxError):  # it lacks this package, or is too old for it
    pass
finally:  # Python reports any other error, and goes on
    _own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = _own
