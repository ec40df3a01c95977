"""What Python and torch say of a program's own code names no cause by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, logs

CATALOGUE = catalogue.load()
STEPS = "step 1/10 loss 2.1\nstep 2/10 loss 2.0\n"
MESSAGES = """
KeyError: 'alpha'
KeyError: 'text'
KeyError: 'vllm'
KeyError: 'optimizer'
KeyError: 'layer.0.weight'
IndexError: list index out of range
AttributeError: 'Runner' object has no attribute 'alpha'
AttributeError: 'NoneType' object has no attribute 'shape'
AttributeError: 'str' object has no attribute 'get'
AttributeError: property 'alpha' of 'Runner' object has no setter
AttributeError: Can't pickle local object 'make.<locals>.inner'
TypeError: run() got an unexpected keyword argument 'alpha'
TypeError: Runner.__init__() got an unexpected keyword argument 'alpha'
TypeError: run() missing 1 required positional argument: 'alpha'
TypeError: 'NoneType' object is not subscriptable
TypeError: string indices must be integers, not 'str'
TypeError: expected string or bytes-like object, got 'NoneType'
TypeError: '<' not supported between instances of 'str' and 'int'
ValueError: too many values to unpack (expected 2)
ValueError: could not convert string to float: 'abc'
ValueError: max() arg is an empty sequence
ValueError: expected sequence of length 3 at dim 1 (got 2)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)
RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16
RuntimeError: The size of tensor a (4) must match the size of tensor b (3) at \
non-singleton dimension 1
RuntimeError: Expected all tensors to be on the same device, but found cuda:0 and cpu!
RuntimeError: Trying to backward through the graph a second time
RuntimeError: grad can be implicitly created only for scalar outputs
RuntimeError: torch.cat(): expected a non-empty list of Tensors
RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and \
[4] at entry 1
AssertionError: expected 4 rows, got 3
FileNotFoundError: [Errno 2] No such file or directory: 'abc.txt'
ZeroDivisionError: division by zero
EOFError: Ran out of input
ImportError: cannot import name 'alpha' from 'helpers' (/job/own/helpers.py)
ImportError: attempted relative import with no known parent package
ModuleNotFoundError: No module named 'own.helpers'
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='svc', port=80): timed out
concurrent.futures.process.BrokenProcessPool: A process was terminated abruptly
Fatal Python error: Segmentation fault
"""


def raised(message: str, function: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/job/own/go.py", line 60, in <module>\n'
        f"    {function}(1)\n"
        f'  File "/job/own/parts.py", line 20, in {function}\n'
        "    x = f(k)\n"
        f"{message}\n"
    )


@pytest.mark.parametrize("function", ["update_actor", "generate_sequences"])
@pytest.mark.parametrize("message", MESSAGES.strip().splitlines())
def test_an_error_of_ones_own_code_names_no_cause(
    message: str, function: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text(STEPS + raised(message, function))
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []
    assert report.verdict == "unknown"
