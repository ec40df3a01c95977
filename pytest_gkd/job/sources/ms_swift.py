"""The options of ms-swift's commands, from their dataclasses."""

from __future__ import annotations

from typing import Any

from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError
from pytest_gkd.job.sources.trl import classes

# The class that each command reads its arguments into (swift/pipelines, 4.6.0).
PROGRAMS = {
    "swift rlhf": "RLHFArguments",
    "swift sft": "SftArguments",
    "swift pt": "PretrainArguments",
    "swift deploy": "DeployArguments",
    "swift rollout": "RolloutArguments",
    "megatron rlhf": "MegatronRLHFArguments",
    "megatron sft": "MegatronSftArguments",
    "megatron pt": "MegatronPretrainArguments",
}


# Up to 3.12 one class served both.
OLD = {
    "SftArguments": "TrainArguments",
    "PretrainArguments": "TrainArguments",
    "MegatronSftArguments": "MegatronTrainArguments",
    "MegatronPretrainArguments": "MegatronTrainArguments",
}


def read(files: Files) -> Schema:
    """The classes that ms-swift's commands read their arguments into.

    The classes of transformers that they inherit from are in its own schema.
    """
    known: dict[str, Any] = {}
    for text in files.values():
        known |= classes(text, known)
    named = {p: c if c in known else OLD.get(c, c) for p, c in PROGRAMS.items()}
    used: dict[str, Any] = {}
    waiting = [name for name in named.values() if name in known]
    while waiting:
        name = waiting.pop()
        used[name] = known[name]
        waiting += [base for base in known[name]["bases"] if base in known]
    lost = [name for name, own in named.items() if own not in used]
    if lost:
        raise SourceError(f"it has no class of arguments for {', '.join(lost)}")
    return {"classes": used, "programs": named}


def gone(
    schema: Schema, release: str, older: list[tuple[str, Schema]]
) -> dict[str, list[str]]:
    """The fields of older releases that no class has anymore.

    Each with the last of these releases that has it, and the first that does not.
    """

    def keys(one: Schema) -> set[str]:
        return {key for own in one["classes"].values() for key in own["fields"]}

    follow = [release for release, _ in older[1:]] + [release]
    return {
        key: [last, after]
        for (last, old), after in zip(older, follow, strict=True)
        for key in sorted(keys(old) - keys(schema))
    }


def completed(schema: Schema, release: str, last: str, older: Schema) -> Schema:
    """A schema that was read, with older releases' fields from their last record."""
    return {
        **schema,
        "removed": {**older["removed"], **gone(schema, release, [(last, older)])},
    }


SOURCE = Source(
    {
        "swift": tuple(
            f"swift/{folder}/**/*.py"
            for folder in (
                *("llm/argument", "arguments", "trainers", "rlhf_trainers", "ray"),
                *("ray_utils", "hub", "plugin", "megatron/argument"),
                "megatron/arguments",
            )
        )
    },
    read,
    completed,
    ("transformers", "accelerate"),
)
