"""Run by Python at its start in what a stage starts (docs.python.org, module site).

Has the process tell how long it imports, then gives way to the sitecustomize module
that would have been found without this one. It may be another Python, one without this
package, whose start must not suffer.
"""

import sys

_HERE = __file__.rpartition("/")[0]

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
try:
    from pytest_gkd.processes.import_clock import tell_in_files

    tell_in_files()
except (ImportError, SyntaxError):  # it has not this package, or is too old for it
    pass
finally:  # what else went wrong is told by Python, which goes on
    _own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = _own
