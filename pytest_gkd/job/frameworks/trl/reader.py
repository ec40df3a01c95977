"""TRL: dataclasses read from the command line and YAML (TrlParser), under a launcher.

The parser's treatment of options and configurations is that of TRL 1.16.0:
trl/scripts/utils.py (TrlParser), trl/scripts/_hf_argparser.py and trl/cli/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd.job import dataclass_options, documents, releases, script_file
from pytest_gkd.job.arguments import KINDS, MISSING, MOST_NEAR, Option, parsed
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks import accelerate
from pytest_gkd.job.frameworks.reading import UNKNOWN, Reading, launched
from pytest_gkd.job.frameworks.trl import plan as trl_plan
from pytest_gkd.job.frameworks.trl import rules as trl_rules
from pytest_gkd.job.frameworks.trl.rules import TrlJob
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Word
from pytest_gkd.options import near

PROGRAM = re.compile(
    r"trl (?!vllm-serve|env|skills|chat)[a-z]\w*"
    r"|trl\.(?:scripts|experimental\.\w+)\.(?!vllm_serve)\w+"
    r"|(?:.*/)?(?:trl/scripts|trl/experimental/\w+|examples/scripts(?:/\w+)?)"
    r"/(?!vllm_serve)\w+\.py"
)
# What ``trl NAME`` extracts for its launcher (trl/cli/accelerate_config.py).
LAUNCHER = {"--accelerate_config": Option("accelerate_config")}
VERSION = "config.framework-version"
# Lists that may also be a text: PEFT's "all-linear", a single tracker's name.
TEXTS_FOR_LISTS = ("lora_target_modules", "report_to", "debug")


class Program(NamedTuple):
    """What reads the options: ``fields`` are None if unknown.

    ``passes`` is as in dataclass_options.program; ``is_upstream``: it is TRL's own.
    """

    name: str
    classes: list[str]
    fields: dataclass_options.Fields | None
    passes: str = ""
    is_upstream: bool = False


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of TRL's, or of its launcher's."""
    return "model_name_or_path" in keys or accelerate.is_own(keys)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of TRL, and what is wrong with it."""
    place = (launch.document or Path(launch.command.file)).parent
    reader = _Reader(_known(release), release, place)
    if launch.document is not None:
        return reader.document(launch)
    return reader.command(launch)


class _Reader:
    """Reads one start under one release.

    ``place`` is the script's folder, where relative paths are tried first.
    """

    def __init__(self, known: dict[str, Any], release: Release, place: Path) -> None:
        self._schema, self._known = release.schema, known
        self._release, self._whose = release, f"TRL {release}"
        self._accelerate = releases.beside(release, "accelerate").release
        self._place = place
        self._findings: list[Finding] = []

    def command(self, launch: Launch) -> Reading:
        """A command that starts a script or a subcommand of ``trl``."""
        program = _program(launch, self._known, self._schema, self._place)
        is_command = launch.program.startswith("trl ")
        name = launch.program.removeprefix("trl ")
        if is_command and name not in self._schema["commands"]:
            self._no_command(name, launch)
        words, settings, needs = list(launch.arguments), list[Override](), NOBODY
        if program.passes != "line":
            words, settings, needs = self._config(words)
        self._servers(launch)
        options = self._options(program)
        beside = self._launchers() if is_command else {}
        refuses = program.passes != "all"
        line = parsed(words, {**beside, **options}, self._whose, refuses=refuses)
        if program.fields is not None:
            self._findings += line.findings
            self._findings += [self._stray(word) for word in line.rest if refuses]
        own = {option.key for option in options.values()}
        extra = {option.key for option in beside.values()} - own
        given = self._configured(settings, program, options, extra)
        # A key given on the line is not reported as repeated in the file.
        in_line = {one.key for one in line.said}
        given = [one for one in given if one.key not in in_line]
        everything = [*given, *line.said]
        if is_command:
            launcher = accelerate.configured(
                [one for one in everything if one.key in extra],
                self._place,
                self._accelerate,
                shipped=self._schema["accelerate_configs"],
            )
        else:
            launcher = accelerate.started(launch.before, self._place, self._accelerate)
        said = [one for one in everything if one.key not in extra]
        return self._reading(said, program, launcher, launch, needs)

    def document(self, launch: Launch) -> Reading:
        """A configuration file on its own: the launcher's, or a script's."""
        file = launch.document or Path()
        settings = documents.settings(file)
        line = [
            Override("", key, value, word.text.needs, word)
            for word in launch.arguments
            for key, _, value in [word.text.shape.lstrip("-").partition("=")]
        ]
        if accelerate.is_own({one.key for one in settings}):
            started = accelerate.Started(self._accelerate, "accelerate")
            accelerate.add_file(started, file)
            accelerate.count(started, is_configured=True)
            nothing = Program("", [], None)
            return self._reading([], nothing, started, launch, NOBODY)
        grouped = _grouped([*settings, *line])
        # What is given beside the file may be meant for any of them.
        program = self._fitting({one.key for one in _grouped(settings)})
        options = self._options(program)
        own = {option.key for option in options.values()}
        beside = self._launchers()
        extra = {option.key for option in beside.values()} - own
        said = self._configured(grouped, program, options, extra)
        launcher = accelerate.configured(
            [one for one in said if one.key in extra],
            self._place,
            self._accelerate,
            shipped=self._schema["accelerate_configs"],
        )
        said = [one for one in said if one.key not in extra]
        return self._reading(said, program, launcher, launch, NOBODY)

    def _reading(
        self,
        said: list[Override],
        program: Program,
        launcher: accelerate.Started,
        launch: Launch,
        needs: frozenset[str],
    ) -> Reading:
        defaults = {}
        for name, field in (program.fields or {}).items():
            if not needs and "default" in field:
                defaults[name] = field["default"]
        fields = program.fields
        if fields is None:
            needs = needs or frozenset({f"{program.name or 'the script'}, not read"})
        job = TrlJob(
            Job(defaults, said),
            launcher,
            launch,
            frozenset(fields if fields is not None else {one.key for one in said}),
            frozenset(program.classes),
            needs,
            self._release,
            program.is_upstream,
        )
        told = [self._aged(finding, program) for finding in self._findings]
        told += [*launcher.findings, *trl_rules.findings(job)]
        problem = ""
        if fields is None and program.name:
            problem = (
                f"{program.name} is not one of {self._whose}'s scripts, and the class "
                "that its options are read into was not found: they are not judged"
            )
        values = trl_rules.values(job)
        recipe = trl_plan.recipe(job)
        return Reading(said, values, told, problem, launched(values), recipe)

    def _launchers(self) -> dict[str, Option]:
        return {**accelerate.options(self._accelerate), **LAUNCHER}

    def _options(self, program: Program) -> dict[str, Option]:
        fields = program.fields
        if fields is None:
            fields = {}
            for one in self._known.values():
                fields |= one.get("fields", {})
        return dataclass_options.options(fields, none=self._schema["none"])

    # -- configurations ------------------------------------------------------------

    def _config(
        self, words: list[Word]
    ) -> tuple[list[Word], list[Override], frozenset[str]]:
        """The words without ``--config FILE``, the file's settings, and what it needs.

        TrlParser takes the first one, and only as two words.
        """
        values = [word.text.value for word in words]
        if "--config" not in values:
            inline = [w for w in words if w.text.shape.startswith("--config=")]
            for word in inline:
                text = f"{self._whose} takes --config and its file as two words only"
                self._add(UNKNOWN, "error", text, word, "config")
            return [word for word in words if word not in inline], [], NOBODY
        number = values.index("--config")
        rest = [*words[:number], *words[number + 2 :]]
        if number + 1 == len(words):
            self._add(MISSING, "error", "--config expects a file", words[number])
            return rest, [], frozenset({"--config's file"})
        word = words[number + 1]
        named = word.text.value
        if named is None:
            return rest, [], word.text.needs
        path = accelerate.existing(named, self._place)
        if path is None:
            if named.startswith("/"):
                text = f"--config {named}: there is no such file"
                self._add(MISSING, "error", text, word, "config")
            return rest, [], frozenset({f"{named}, which is not found"})
        try:
            return rest, _grouped(documents.settings(path)), NOBODY
        except CheckError as error:
            self._add(MISSING, "error", f"--config: {error}", word, "config")
            return rest, [], frozenset({named})

    def _configured(
        self,
        settings: list[Override],
        program: Program,
        options: Mapping[str, Option],
        extra: AbstractSet[str],
    ) -> list[Override]:
        """The settings of a file as TrlParser makes them defaults of its options.

        argparse converts only defaults that are strings.
        """
        by_key = {o.key: o for o in options.values() if o.type not in ("true", "false")}
        found = []
        looked = 0
        for setting in settings:
            key = setting.key
            option = by_key.get(key)
            if option is not None:
                found.append(self._converted(setting, option))
            elif key in extra or key == "env":
                found.append(setting)
            elif program.fields is not None:
                looked += 1
                hint = near(key, by_key) if looked <= MOST_NEAR else "."
                passes = program.passes in ("config", "all")
                text = f"{self._whose} has no key {key}{hint}"
                text += " It passes it over, and nothing reads it." if passes else ""
                level = "warning" if passes else "error"
                self._add(UNKNOWN, level, text, setting.word, key)
        return found

    def _converted(self, setting: Override, option: Option) -> Override:
        key, value, word = setting.key, setting.value, setting.word
        if isinstance(value, str):
            try:
                value = option.converted(value)
            except ValueError:
                text = (
                    f"{key}: {value[:60]}: {self._whose} expects {KINDS[option.type]}"
                )
                self._add(UNKNOWN, "error", text, word, key)
            if option.most > 1 and key not in TEXTS_FOR_LISTS and value is not None:
                text = f"{key} is a list: this string is read character by character"
                self._add(UNKNOWN, "error", f"{text}; write [{value}]", word, key)
        elif option.type == "int" and isinstance(value, float):
            text = f"{key}: {value} is not an integer, and nothing makes it one"
            self._add(UNKNOWN, "warning", text, word, key)
        if option.choices and value is not None:
            several = value if isinstance(value, list) else [value]
            wrong = [one for one in several if one not in option.choices]
            if wrong:
                some = ", ".join(map(str, option.choices))
                text = f"{key}: {wrong[0]}: {self._whose} knows {some}"
                if isinstance(wrong[0], bool) and "no" in option.choices:
                    text += '. YAML reads no, off and false as false: write "no"'
                self._add(UNKNOWN, "error", text, word, key)
        return setting._replace(value=value)

    def _fitting(self, keys: AbstractSet[str]) -> Program:
        """What may read a file with these keys: the scripts that know most of them.

        A default that differs among them is unknown.
        """
        counts: dict[int, list[dataclass_options.Fields]] = {}
        for name, one in self._schema["programs"].items():
            if "/ppo" in name or one["passes"] == "line":
                continue
            fields = dataclass_options.union_of(one["classes"], self._known)
            counts.setdefault(len(keys - fields.keys()), []).append(fields)
        first, *others = counts[min(counts)]
        shared = dict(first)
        for other in others:
            for name in list(shared):
                if name not in other and name not in keys:
                    del shared[name]
                elif other.get(name) != shared[name]:
                    shared[name] = {**shared[name], "unknown": "the script's"}
                    shared[name].pop("default", None)
        return Program("", [], shared)

    def _servers(self, launch: Launch) -> None:
        """The options of a ``trl vllm-serve`` in the same script."""
        script = self._schema["programs"].get("trl/scripts/vllm_serve.py")
        if script is None or script["passes"] == "all":  # the rest is passed to vLLM
            return
        fields = dataclass_options.union_of(script["classes"], self._known)
        options = dataclass_options.options(fields, none=self._schema["none"])
        for server in trl_rules.servers(launch.beside):
            if server.is_trl:
                whose = f"{self._whose}'s vllm-serve"
                read = parsed(self._config(list(server.words))[0], options, whose)
                self._findings += read.findings

    # -- faults --------------------------------------------------------------------

    def _add(
        self, cause: str, level: str, text: str, word: Word, key: str = ""
    ) -> None:
        self._findings.append(Finding(cause, level, text, word.file, word.line, key))

    def _no_command(self, name: str, launch: Launch) -> None:
        commands = self._schema["commands"]
        text = f"{self._whose}'s command line has no {name}{near(name, commands)}"
        paths = [p for p in self._schema["programs"] if p.endswith(f"/{name}.py")]
        if paths:
            text += f" It has a script for it: accelerate launch {paths[0]} ..."
        word = launch.command.words[
            len(launch.command.words) - len(launch.arguments) - 1
        ]
        self._add(UNKNOWN, "error", text, word, name)

    def _stray(self, word: Word) -> Finding:
        text = f"{word.source[:60]} belongs to no option: {self._whose} refuses it"
        return Finding(UNKNOWN, "error", text, word.file, word.line, "")

    def _aged(self, finding: Finding, program: Program) -> Finding:
        """Add to the finding which older releases had the key."""
        key = finding.key.lstrip("-").replace("-", "_")
        theirs = releases.beside(self._release, "transformers").release
        for whose, gone in (
            ("TRL", self._schema.get("removed", {})),
            ("transformers", theirs.schema.get("removed", {})),
        ):
            for one in _bases(program.classes, self._known):
                if finding.cause == UNKNOWN and key in gone.get(one, {}):
                    last, first = gone[one][key]
                    text = (
                        f"{finding.message} {one} had it in {whose} {last}, and has it "
                        f"no more in {first}."
                    )
                    return finding._replace(cause=VERSION, message=text)
        return finding


def _bases(classes: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    found = []
    for name in classes:
        if "bases" in known.get(name, {}):
            found += [name, *_bases(known[name]["bases"], known)]
    return found


def _grouped(settings: Iterable[Override]) -> list[Override]:
    """Top-level settings: nested keys become one mapping as the value."""
    found: dict[tuple[str, int], Override] = {}
    for number, one in enumerate(settings):
        top, dot, below = one.key.partition(".")
        if not dot:
            found[top, number] = one
        else:
            before = found.get((top, -1))
            value = {**(before.value if before else {}), below: one.value}
            found[top, -1] = (before or one)._replace(key=top, value=value)
    return list(found.values())


# -- what reads the options ----------------------------------------------------------


def _known(release: Release) -> dict[str, Any]:
    """TRL's classes, and those of transformers that they inherit from."""
    inherited = releases.beside(release, "transformers").release.schema
    return {**inherited["classes"], **release.schema["classes"]}


def _program(
    launch: Launch, known: Mapping[str, Any], schema: Mapping[str, Any], place: Path
) -> Program:
    """The classes that the started script reads its options into."""
    name = launch.program
    if name.startswith("trl "):
        path = f"trl/scripts/{name.removeprefix('trl ')}.py"
    elif name.endswith(".py"):
        path = name
    else:
        path = name.replace(".", "/") + ".py"
    upstream = schema["programs"]
    script = next((own for own in upstream if f"/{path}".endswith(f"/{own}")), "")
    if script:
        found, own = upstream[script], known
        # trl NAME passes options unknown to its script to accelerate's parser.
        passes = "" if name.startswith("trl ") else found["passes"]
    else:
        file = accelerate.existing(path, place)
        try:
            text = "" if file is None else script_file.text_of(file, is_script=False)
            own = {**known, **dataclass_options.classes(text, known)}
            found = dataclass_options.program(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Program(name, [], None)
        passes = found["passes"]
    classes = found["classes"]
    try:
        fields = dataclass_options.union_of(classes, own)
    except KeyError:
        fields = {}
    if not fields:
        return Program(name, [], None, is_upstream=bool(script))
    return Program(name, classes, fields, passes, bool(script))
