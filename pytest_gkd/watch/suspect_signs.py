"""Which suspects of a standstill are seen in the job's stacks, and which cannot be.

An observation names functions as ``save (torch/serialization.py)``, all those of a file
as ``a function of torch/cuda/streams.py``, and a state as ``in state D``.
"""

from __future__ import annotations

import re

from pytest_gkd.diagnosis.suspects import Suspect
from pytest_gkd.watch.samples import JobSample

SEEN, POSSIBLE, RULED_OUT = "seen", "possible", "ruled out"
_FUNCTION = re.compile(r"(\w+) \((<frozen [\w.]+>|[\w/.]+\.py)\)")
_ANY_OF = re.compile(r"function of ([\w/.]+\.py)")
_DISK = "in state D"


def standing(suspect: Suspect, sample: JobSample) -> str:
    """SEEN where all that it names is there, RULED_OUT where nothing of it can be.

    Nothing is ruled out while a part of the job cannot be looked into.
    """
    text = suspect.observation
    frames = {
        (frame.function.rpartition(".")[2], frame.file)
        for one in sample.processes
        for thread in one.threads
        for frame in thread.frames
    }
    found = [
        any(name == function and path.endswith(file) for name, path in frames)
        for function, file in _FUNCTION.findall(text)
    ]
    found += [
        any(path.endswith(file) for _, path in frames) for file in _ANY_OF.findall(text)
    ]
    is_held = any(one.state == "D" for one in sample.processes)
    if _DISK in text:
        found.append(is_held)
    whole = not (sample.remote or sample.unseen)
    if found and all(found):
        return SEEN
    hopeless = not any(found) or (_DISK in text and not is_held)
    return RULED_OUT if found and hopeless and whole else POSSIBLE
