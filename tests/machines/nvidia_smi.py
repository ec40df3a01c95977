"""nvidia-smi, as far as the environment stage asks it, of a recorded machine."""

import os
import sys
from pathlib import Path

FIELDS = {
    "index": lambda gpu: gpu["index"],
    "uuid": lambda gpu: gpu["words"][0],
    "name": lambda gpu: gpu["name"],
    "driver_version": lambda gpu: gpu["driver"],
    "memory.total": lambda gpu: gpu["words"][1],
    "memory.used": lambda gpu: str(int(gpu["words"][1]) - int(gpu["words"][2])),
    "compute_cap": lambda gpu: ".".join(gpu["words"][3:5]),
}

lines = Path(os.environ["RECORDED_MACHINE"]).read_text().splitlines()
driver = next(line.split()[1] for line in lines if line.startswith("driver "))
gpus = []
for line in lines:
    if line.startswith("gpu "):
        words = line.split(maxsplit=9)[1:]
        gpus.append(
            {
                "index": str(len(gpus)),
                "driver": driver,
                "words": words,
                "name": words[8],
            }
        )
what, _, fields = sys.argv[1].removeprefix("--query-").partition("=")
if what == "compute-apps":
    for line in lines:
        if line.startswith("process "):
            _, index, pid, _, mib = line.split()
            print(f"{gpus[int(index)]['words'][0]}, {pid}, {mib}")
    sys.exit()
for field in fields.split(","):
    if field == "compute_cap" and int(driver.partition(".")[0]) < 510:
        print(f'Field "{field}" is not a valid field to query.\n')
        sys.exit(2)
for gpu in gpus:
    print(", ".join(FIELDS[field](gpu) for field in fields.split(",")))
