"""What the frameworks' sources say about their options; nothing is imported."""

from __future__ import annotations

from pytest_gkd.job.sources import (
    areal,
    ms_swift,
    nemo_rl,
    prime_rl,
    programs,
    roll,
    skyrl,
    slime,
    trl,
    verl,
)
from pytest_gkd.job.sources.files import Source

SOURCES: dict[str, Source] = {
    "verl": verl.SOURCE,
    "trl": trl.TRL,
    "transformers": trl.TRANSFORMERS,
    "accelerate": trl.ACCELERATE,
    "ms-swift": ms_swift.SOURCE,
    "nemo-rl": nemo_rl.SOURCE,
    "slime": slime.source("slime"),
    "miles": slime.source("miles"),
    "openrlhf": programs.OPENRLHF,
    "lightrft": programs.LIGHTRFT,
    "prime-rl": prime_rl.SOURCE,
    "skyrl": skyrl.SOURCE,
    "areal": areal.SOURCE,
    "roll": roll.SOURCE,
}
