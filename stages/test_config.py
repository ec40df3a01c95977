"""Stage config: the job's own configuration, judged without running any of it."""

from __future__ import annotations

import pytest

from pytest_gkd.stage_api import StageContext, StageFault


@pytest.mark.gkd_stage("config")
def test_config(gkd: StageContext) -> None:
    """All faults at once, as ``gkd check`` found them when the run started."""
    job = gkd.settings.job
    assert job is not None  # the stage is only offered with a job
    gkd.fact("job", job)
    faults = []
    for finding in job["findings"]:
        text = finding["message"]
        if finding["line"]:
            text = f"line {finding['line']}: {text}"
        if finding["level"] == "error":
            where = (finding["file"], finding["line"], finding["key"])
            faults.append(StageFault(finding["cause"], text, evidence=(where,)))
        else:
            gkd.note(finding["cause"] or "config.note", text)
    for text in job["left"]:
        gkd.note("config.not-taken", text)
    if faults:
        first, *others = faults
        raise StageFault(
            first.cause, first.message, evidence=first.evidence, also=others
        )
    values = job["values"].values()
    unknown = sum(value["source"] == "undetermined" for value in values)
    gkd.fact(
        "summary",
        f"{job['framework']} {job['release']}, {len(job['taken'])} settings taken"
        + (f", {unknown} values undetermined" if unknown else ""),
    )
