"""Options as values, and what is said of a value that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import options, typed_json
from pytest_gkd.options import OPTIONS, Budget, Option, Settings, SettingsError
from pytest_gkd.run.assignment import Assignment
from pytest_gkd.run.events import EventPaths
from pytest_gkd.run.selection import Request, Selection
from pytest_gkd.stage_specs import BY_NAME, LAYOUTS


def option(kind: str, default: Any = None, choices: tuple[str, ...] = ()) -> Option:
    return Option("some_thing", kind, default, "X", "help", choices)


def complaint(
    kind: str, raw: Any, choices: tuple[str, ...] = (), origin: str = "--gkd-x"
) -> str:
    with pytest.raises(SettingsError) as caught:
        options.read_value(option(kind, choices=choices), raw, origin)
    return str(caught.value)


# -- the table of options ----------------------------------------------------------


def test_an_option_has_two_spellings() -> None:
    assert option("text").flag == "--gkd-some-thing"
    assert option("text").ini == "gkd_some_thing"


def test_every_default_is_one_of_its_choices() -> None:
    for one in OPTIONS:
        assert (one.kind == "choice") == bool(one.choices), one.name
        if one.choices:
            assert one.default in one.choices


# -- one value ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("text", "model", "model"),
        ("count", "3", 3),
        ("count", " 3 ", 3),
        ("number", "0", 0.0),
        ("number", "1e-3", 1e-3),
        ("list", ["a,b", "c"], ("a", "b", "c")),
        ("list", "a, b,", ("a", "b")),
        ("flag", True, True),
        ("flag", "yes", True),
        ("flag", "ON", True),
        ("flag", "off", False),
        ("flag", "0", False),
    ],
)
def test_a_raw_value_is_read_as_its_kind(kind: str, raw: Any, value: Any) -> None:
    read = options.read_value(option(kind), raw, "--gkd-x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("raw", [None, "", []])
def test_no_value_is_the_default(raw: Any) -> None:
    assert options.read_value(option("count", 42), raw, "--gkd-x") == 42


@pytest.mark.parametrize("raw", ["0", "-1", "1.5", "many", "nan", "1e3"])
def test_a_count_is_a_whole_number_above_0(raw: str) -> None:
    text = complaint("count", raw)
    assert text == f"--gkd-x: {raw!r} is not a whole number above 0"


@pytest.mark.parametrize("raw", ["-0.1", "nan", "inf", "-inf", "1e999", "half"])
def test_a_number_is_finite_and_not_negative(raw: str) -> None:
    assert complaint("number", raw) == f"--gkd-x: {raw!r} is not a number, 0 or more"


def test_a_flag_is_true_or_false() -> None:
    assert complaint("flag", "maybe") == "--gkd-x: 'maybe' is neither true nor false"


def test_a_choice_is_one_of_those_offered() -> None:
    layouts = option("choice", choices=LAYOUTS)
    assert options.read_value(layouts, "split", "--gkd-x") == "split"


def test_a_wrong_choice_lists_the_right_ones_and_the_near_one() -> None:
    text = complaint("choice", "spilt", LAYOUTS)
    assert "'spilt' is not one of colocated, split, ray" in text
    assert text.endswith("; did you mean 'split'?")


def test_a_complaint_says_where_the_value_came_from() -> None:
    origin = "gkd_top_k in the ini file"
    assert complaint("count", "0", origin=origin).startswith(f"{origin}: '0'")


# -- near names --------------------------------------------------------------------


def test_a_word_near_nothing_gets_a_full_stop() -> None:
    assert options.near("zzz", BY_NAME) == "."


def test_at_most_three_near_names_are_given() -> None:
    assert options.near("aaaa", ["aaab", "aaac", "aaad", "aaae"]).count("or") == 2


# -- budgets -----------------------------------------------------------------------


def budgets(*entries: str) -> list[tuple[str, float]]:
    read = options.read_budgets((one, "--gkd-timeout") for one in entries)
    return [(one.stage, one.seconds) for one in read]


def test_budgets_are_read_by_stage_name() -> None:
    assert budgets("all = 2.5", "nccl=90") == [("nccl", 90.0), ("all", 2.5)]


def test_a_later_budget_wins() -> None:
    assert budgets("nccl=90", "nccl=5")[0] == ("nccl", 5.0)


def test_a_budget_may_have_a_unit() -> None:
    assert budgets("launch=20m", "nccl=90s", "vllm=1.5h", "all=2 min") == [
        ("vllm", 5400.0),
        ("nccl", 90.0),
        ("launch", 1200.0),
        ("all", 120.0),
    ]


@pytest.mark.parametrize(
    "seconds", ["0", "-1", "soon", "inf", "nan", "", "0m", "m", "5d", "5 m s", "1e309"]
)
def test_a_budget_is_a_time_above_0(seconds: str) -> None:
    with pytest.raises(SettingsError) as caught:
        budgets(f"nccl={seconds}")
    assert str(caught.value) == (
        f"--gkd-timeout (nccl): {seconds!r} is not a time above 0, such as 90 "
        "(seconds), 90s, 20m or 1h"
    )


def test_a_budget_without_a_name_is_shown_how_it_should_be() -> None:
    with pytest.raises(SettingsError, match=r"'90' is not NAME=TIME.*nccl=90"):
        budgets("90")


def test_an_unknown_stage_is_told_with_who_named_it_and_lists_the_stages() -> None:
    for wrong, right in (("ncl", "nccl"), ("al", "all")):
        asked = [("data", "a"), ("all", "b"), (wrong, "gkd_timeout in tox.ini")]
        with pytest.raises(SettingsError) as caught:
            options.check_names(asked)
        text = str(caught.value)
        assert text.startswith(f"gkd_timeout in tox.ini: there is no stage {wrong!r}")
        assert f"did you mean {right!r}?" in text
        assert f"Stages found: {', '.join(BY_NAME)}; all means" in text


# -- stage names -------------------------------------------------------------------


def test_stage_names_keep_the_users_order() -> None:
    assert options.read_stage_names(" nccl, data ,", "x") == ("nccl", "data")


@pytest.mark.parametrize("raw", ["", ",", " "])
def test_no_stage_name_is_an_error_that_lists_them(raw: str) -> None:
    with pytest.raises(SettingsError) as caught:
        options.read_stage_names(raw, "--gkd-stages")
    assert str(caught.value).startswith("--gkd-stages: no stage named")
    assert ", ".join(BY_NAME) in str(caught.value)


def test_an_unknown_stage_is_met_with_the_users_own_stages_too() -> None:
    with pytest.raises(SettingsError) as caught:
        options.check_names([("prob", "--gkd-stages")], ["probe", "data"])
    text = str(caught.value)
    assert "there is no stage 'prob'; did you mean 'probe'?" in text
    assert text.count("data") == 1


# -- choices made for the user -----------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "layout", "why"),
    [
        (0, "colocated", "no GPU is visible"),
        (1, "split", "one GPU is visible"),
        (8, "ray", "8 GPUs are visible"),
    ],
)
def test_auto_takes_the_layout_that_fits_the_gpus(
    gpus: int, layout: str, why: str
) -> None:
    assert options.choose_layout("auto", gpus, has_ray=True) == (layout, why)


def test_several_gpus_without_ray_are_split() -> None:
    layout, why = options.choose_layout("auto", 8, has_ray=False)
    assert (layout, why) == ("split", "8 GPUs are visible and Ray is not installed")


def test_gpus_that_take_one_process_are_not_shared_by_ray_actors() -> None:
    for gpus, layout in ((2, "split"), (3, "ray")):
        chosen = options.choose_layout("auto", gpus, has_ray=True, exclusive=True)
        assert chosen[0] == layout


def test_a_gpu_that_takes_one_process_gets_one() -> None:
    layout, why = options.choose_layout("auto", 1, has_ray=True, exclusive=True)
    assert layout == "colocated"
    assert "one process at a time" in why


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_was_asked_for_stands(layout: str) -> None:
    for gpus in (0, 1, 8):
        chosen = options.choose_layout(
            layout, gpus, has_ray=False, exclusive=True, origin="tox.ini"
        )
        assert chosen == (layout, "tox.ini")


def test_the_world_is_every_visible_gpu() -> None:
    assert options.choose_world_size(None, 4, 2) == (4, "every visible GPU")


def test_the_world_is_two_ranks_without_a_gpu() -> None:
    assert options.choose_world_size(None, 0, 2) == (2, "the default without a GPU")


@pytest.mark.parametrize(
    ("asked", "layout", "gpus", "ranks", "share"),
    [
        (None, "colocated", 0, 1, 0.3),
        (None, "colocated", 8, 1, 0.3),
        (None, "split", 1, 1, 0.3),
        (None, "split", 2, 1, 0.85),
        (None, "ray", 2, 2, 0.3),
        (None, "ray", 8, 4, 0.85),
        (0.5, "ray", 8, 4, 0.5),
    ],
)
def test_an_engine_gets_most_of_the_gpus_that_it_has_to_itself(
    asked: float | None, layout: str, gpus: int, ranks: int, share: float
) -> None:
    assert options.choose_memory(asked, layout, gpus, ranks) == share


@pytest.mark.parametrize(("asked", "gpus", "cpus"), [(4, 4, 1), (1, 4, 1), (16, 0, 2)])
def test_a_world_that_fits_stands(asked: int, gpus: int, cpus: int) -> None:
    assert options.choose_world_size(asked, gpus, cpus, "tox.ini") == (asked, "tox.ini")


@pytest.mark.parametrize(
    ("asked", "gpus", "cpus", "why", "most"),
    [(5, 4, 64, "shows 4 GPU(s)", 4), (17, 0, 2, "has no GPU", 16)],
)
def test_more_ranks_than_gpus_or_cores_are_refused_with_the_most_that_fit(
    asked: int, gpus: int, cpus: int, why: str, most: int
) -> None:
    with pytest.raises(SettingsError) as caught:
        options.choose_world_size(asked, gpus, cpus)
    text = str(caught.value)
    assert text.startswith(f"--gkd-world-size: {asked} ranks, but this machine {why}")
    assert f"--gkd-world-size={most} or fewer" in text


# -- the settings ------------------------------------------------------------------


def test_what_was_asked_for_survives_the_way_to_a_worker() -> None:
    settings = Settings(
        student="s", train_files=("a", "b"), gpus=2, origins={"student": "tox.ini"}
    )
    chosen = Selection(None, ("data",), True, ("test_own.py",), "tox.ini")
    sent = Assignment(
        "gw0",
        Request(chosen, (Budget("all", 2.5, "--gkd-timeout"),), settings),
        Path("run"),
        Path("report"),
        Path("manifest"),
        EventPaths(Path("events"), Path("states")),
        Path("verdicts"),
        None,
        "1",
    )
    assert typed_json.loads(Assignment, typed_json.dumps(sent)) == sent


def test_a_key_that_no_field_has_is_named_and_one_that_is_missing_too() -> None:
    with pytest.raises(ValueError, match="unknown keys nam"):
        typed_json.read(Budget, {"stage": "data", "nam": 1})
    with pytest.raises(ValueError, match="origin, seconds missing"):
        typed_json.read(Budget, {"stage": "data"})


def test_the_device_is_cuda_when_a_gpu_is_visible() -> None:
    assert Settings(gpus=0).device == "cpu"
    assert Settings(gpus=1).device == "cuda"
