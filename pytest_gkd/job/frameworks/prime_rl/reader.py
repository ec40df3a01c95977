"""prime-rl: TOML files that are merged on top of each other, and pydantic classes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_gkd.job import documents, script_file
from pytest_gkd.job.arguments import MISSING, UNKNOWN
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.accelerate import existing
from pytest_gkd.job.frameworks.prime_rl import plan
from pytest_gkd.job.frameworks.prime_rl import rules as prime_rl_rules
from pytest_gkd.job.frameworks.prime_rl.keys import (
    Classes,
    Judge,
    Settings,
    Uncertain,
)
from pytest_gkd.job.frameworks.reading import Reading, derived, names
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.pydantic_types import members
from pytest_gkd.job.pydantic_types import read as read_type
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Text, Word

PROGRAMS = ("rl", "sft", "trainer", "orchestrator", "inference", "evals")
NAMES = "|".join(PROGRAMS)
PROGRAM = re.compile(
    rf"(?P<common>{NAMES})|prime_rl\.(?:entrypoints\.(?:{NAMES})|trainer\.rl\.train)"
)
# Tables of its trainer; verl and SkyRL have a trainer, too.
TRAINER = re.compile(
    r"trainer\.(?:model|optim|scheduler|loss|ckpt|data|weight_broadcast)\."
)
FILE = "@"
TRUTHS = {"true": True, "True": True, "1": True}
TRUTHS |= {"false": False, "False": False, "0": False}
MOST_FILES = 50
# Where the roles' classes are in the whole configuration.
ROLES = {
    "TrainerConfig": "trainer.",
    "OrchestratorConfig": "orchestrator.",
    "InferenceConfig": "inference.",
    "EvalsConfig": "evals.",
}


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of prime-rl's.

    Likewise for a command of a common name that reads a file after an @.
    """
    tops = {key.partition(".")[0] for key in keys}
    is_rl = "orchestrator" in tops or any(TRAINER.match(key) for key in keys)
    is_sft = "model.name" in keys and {"data", "optim"} <= tops
    return FILE in keys or is_rl or is_sft


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of prime-rl, and what it would refuse."""
    schema = release.schema
    classes, whose = Classes(schema), f"prime-rl {release}"
    line = _CommandLine(classes, whose, Path(launch.command.file).parent)
    if launch.document:
        line.add_file(launch.document, "", None)
    line.split(launch.arguments)
    top = _program(launch, line.settings, schema)
    if not top:
        text = f"{whose} has no program {launch.program}"
        word = launch.command.words[0]
        fault = Finding(UNKNOWN, "error", text, word.file, word.line, launch.name)
        unknown = Given("undetermined", needs=frozenset({text}))
        return Reading([], {"student": unknown}, [fault])
    line.take(top)
    settings, findings = line.settings, line.findings
    if top == "RLConfig":
        findings += prime_rl_rules.propagated(settings, classes)
    elif top == "SFTConfig" and classes.knows(top, "inference.vllm.model"):
        # configs/sft.py, propagate_model_to_inference
        prime_rl_rules.filled(settings, "inference.vllm.model", "model.name")
    judge = Judge(settings, classes, whose)
    findings += judge.section(top, settings.tree)
    findings += prime_rl_rules.judged(settings, classes, top, judge.sections, whose)
    problem = ""
    if line.lost:
        problem = f"what {line.lost.source[:60]} adds or changes is not known"
    recipe = plan.recipe(partial(classes.find, settings, top), top)
    values = _values(settings, classes, top)
    return Reading(line.said, values, findings, problem, recipe=recipe)


def _program(launch: Launch, settings: Settings, schema: Mapping[str, Any]) -> str:
    """The class of the started program, or the one that fits a file best.

    Empty for a program that the release does not have.
    """
    programs: dict[str, str] = schema["programs"]
    if launch.document is None:
        name = launch.program.rpartition(".")[2]
        return programs.get("trainer" if name == "train" else name, "")
    classes = Classes(schema)

    def faults(name: str) -> tuple[int, int]:
        judge = Judge(settings, classes, "")
        strange = settings.tree.keys() - classes.fields(programs[name]).keys()
        return len(strange), len(list(judge.section(programs[name], settings.tree)))

    return programs[min((n for n in PROGRAMS if n in programs), key=faults)]


# -- the command line --------------------------------------------------------------


class _CommandLine:
    """Files after an @ and options, as pydantic_config 0.4.3 (cli.py) reads them."""

    def __init__(self, classes: Classes, whose: str, place: Path) -> None:
        self._classes, self._whose, self._place = classes, whose, place
        self.settings = Settings()
        self.said: list[Override] = []
        self.findings: list[Finding] = []
        self.lost: Word | None = None
        self._rest: list[Word] = []
        self._read = 0

    def split(self, words: Sequence[Word]) -> None:
        """Read the files of ``@ FILE`` and ``--key @ FILE``; keep the other words."""
        # cli.py, _process_args: files for keys override files for the whole.
        nested: list[tuple[Word, str, Word]] = []
        at = 0
        while at < len(words):
            word, shape = words[at], words[at].text.shape
            following = words[at + 1] if at + 1 < len(words) else None
            if shape == FILE:
                if following is None:
                    self._refuse("@ is not followed by a file", word, FILE)
                else:
                    self._add(following, "", following.text.value)
                at += 2
            elif shape.startswith("--") and following and following.text.shape == FILE:
                if at + 2 < len(words):
                    nested.append((words[at + 2], shape[2:], words[at + 2]))
                at += 3
            elif (
                shape.startswith("--")
                and following
                and len(following.text.shape) > 1
                and following.text.shape.startswith(FILE)
            ):
                name = (following.text.value or "")[1:]
                text = Text(name, following.text.needs)
                nested.append((following._replace(text=text), shape[2:], following))
                at += 2
            else:
                self._rest.append(word)
                at += 1
        for word, key, _ in nested:
            self._add(word, key, word.text.value)

    def _add(self, word: Word, key: str, name: str | None) -> None:
        if name is None or word.text.needs:
            self.lost = self.lost or word
            return
        path = existing(name, self._place)
        if path is None:
            text = f"the configuration {name[:200]} does not exist"
            self._refuse(text, word, name[:60], MISSING)
        else:
            self.add_file(path, key, word)

    def add_file(self, path: Path, key: str, word: Word | None) -> None:
        """Merge a file's settings over what is there, under a key."""
        self._read += 1
        if self._read > MOST_FILES:
            raise CheckError(f"{path} is one of more than {MOST_FILES} files")
        if word and path.suffix not in documents.SUFFIXES:
            text = f"{path.name} is not one of {', '.join(documents.SUFFIXES)}"
            self._refuse(text, word, path.name)
            return
        settings = documents.settings(path)
        above = f"{key.replace('-', '_')}." if key else ""
        words = {f"{above}{one.key}": one.word for one in settings}
        if path.suffix == ".toml":
            for inner, line in documents.toml_lines(script_file.text_of(path)).items():
                at = Word(Text(inner), str(path), line, inner)
                words.setdefault(f"{above}{inner}", at)
        tree = Settings()
        for one in settings:
            tree.put(f"{above}{one.key}", one.value, None)
        self.settings.merge(tree.tree, words)

    def take(self, top: str) -> None:
        """Set what the options say, for a program that reads them into a class."""
        words = iter(self._rest)
        waiting = next(words, None)
        while waiting is not None:
            word, shape = waiting, waiting.text.shape
            waiting = next(words, None)
            if not shape.startswith("--"):
                if word.text.needs:
                    self.lost = self.lost or word
                else:
                    text = f"{shape[:60]} is not an option: {self._whose} refuses it"
                    self._refuse(text, word, shape[:60])
                continue
            name, equals, inline = shape[2:].partition("=")
            kind, key = self._kind(top, name)
            values: list[Word] = []
            if kind == "group":
                text = f"--{name} is a section: {self._whose} takes its keys one by one"
                self._refuse(text, word, name)
                continue
            if equals and kind in ("section", "present", "absent"):
                text = (
                    f"--{name}={inline[:40]}: below a section that may be absent "
                    f"{self._whose} takes the = for a part of the name; write "
                    f"--{name} {inline[:40]}"
                )
                # There it is passed on to vLLM, as an argument of that name.
                level = "warning" if "vllm" in name.split(".")[:-1] else "error"
                self._refuse(text, word, name, level=level)
                continue
            if equals:
                values = [word._replace(text=Text(inline, word.text.needs))]
            elif kind not in ("off", "absent", "present"):
                most = 1 << 20 if kind == "list" else 1
                while waiting is not None and len(values) < most:
                    if not self._is_value(kind, waiting):
                        break
                    values.append(waiting)
                    waiting = next(words, None)
            elif waiting and kind == "present" and waiting.text.value == "None":
                values, waiting = [waiting], next(words, None)
            self._set(kind, key, word, values)

    @staticmethod
    def _is_value(kind: str, word: Word) -> bool:
        shape = word.text.shape
        if kind == "flag":
            return shape in TRUTHS or bool(word.text.needs)
        return not shape.startswith("--") or kind == "value"

    def _kind(self, top: str, name: str) -> tuple[str, str]:
        """How an option takes its values, and the key that it sets.

        cli.py: _expand_bare_optional_flags, _parse_cli_to_dict.
        """
        key = name.replace("-", "_")
        for start in ("", "no-"):
            if not name.startswith(start):
                continue
            classes, below, text = [top], False, ""
            parts = name[len(start) :].split(".")
            for number, part in enumerate(parts):
                fields = self._classes.fields(classes[0]) if len(classes) == 1 else {}
                text = fields.get(part.replace("-", "_"), "")
                node = read_type(text or "Any")[0]
                classes = self._classes.of(node)
                is_last = number == len(parts) - 1
                is_plain = len(members(node)) == 1
                if classes and not is_plain and not _is_aliased(node):
                    if is_last:
                        return ("absent" if start else "present"), ".".join(
                            one.replace("-", "_") for one in parts
                        )
                    below = True
                    break
                if not text or _is_aliased(node):
                    text, classes = (text, classes) if is_last else ("", [])
                    break
            own = ".".join(one.replace("-", "_") for one in parts)
            if below:
                return ("off" if start else "section"), own
            if classes and not start and is_plain:
                return "group", own
            kinds = [read_type(text)[0]] if text else []
            told = {one for kind in kinds for one in map(_name, members(kind))}
            if start and "bool" in told:
                return "off", own
            if not start and text:
                is_flag = told <= {"bool", "None"}
                is_list = "list" in told
                return "flag" if is_flag else "list" if is_list else "value", own
        return "unknown", key

    def _set(self, kind: str, key: str, word: Word, values: Sequence[Word]) -> None:
        needs = NOBODY.union(*(one.text.needs for one in values))
        shapes = [one.text.shape for one in values]
        value: Any = shapes[0] if shapes else True
        if needs:
            value = Uncertain(needs)
        elif kind in ("off", "absent"):
            value = False if kind == "off" else "None"
        elif kind == "present":
            value = "None" if shapes else {}
        elif kind == "list" and not (shapes and shapes[0][:1] in ("[", "{")):
            value = shapes
        elif kind == "value" and not shapes:
            self._refuse(f"--{key} has no value", word, key, MISSING)
            return
        elif shapes and shapes[0][:1] in ("[", "{"):
            value = _json(shapes[0])
        elif kind == "flag" and shapes:
            value = TRUTHS.get(shapes[0], shapes[0])
        source = " ".join([word.source, *(o.source for o in values if o is not word)])
        here = word._replace(source=source)
        if value == {}:
            own = self.settings.get(key)
            value = own if isinstance(own, dict) else {}
        self.settings.put(key, value, here)
        shown = None if needs else value
        self.said.append(Override("", key, shown, needs, here))

    def _refuse(
        self,
        text: str,
        word: Word,
        key: str,
        cause: str = UNKNOWN,
        level: str = "error",
    ) -> None:
        self.findings.append(Finding(cause, level, text, word.file, word.line, key))


def _is_aliased(node: ast.expr) -> bool:
    """Whether it is a union with a discriminated union, which cli.py does not inspect.

    _is_optional_model, _is_multi_model_union.
    """
    return isinstance(node, ast.BinOp) and "Annotated" in ast.unparse(node)


def _name(node: Any) -> str:
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# -- values ------------------------------------------------------------------------


def _values(settings: Settings, classes: Classes, top: str) -> dict[str, Given]:
    """All values that the job has."""

    def find(key: str) -> Given | None:
        return classes.find(settings, top, key)

    found: dict[str, Given] = {}
    table = {"SFTConfig": "prime-rl-sft"}.get(top, "prime-rl")
    for name, key in names(table).items():
        above = ROLES.get(top, "")
        if not key.startswith(above):
            continue
        given = find(key.removeprefix(above))
        if given is not None:
            found[name] = given
    if top not in ("RLConfig", "SFTConfig") or "student" not in found:
        return found
    start = "trainer." if top == "RLConfig" else ""
    tokenizer = found.get("tokenizer")
    if tokenizer is None or (tokenizer.value is None and not tokenizer.needs):
        found["tokenizer"] = found["student"]
    # trainer/batch.py, prepare_sample; trainer/sft/data.py, CatDataset
    found["truncation"] = Given("default", "right", expression="its only way")
    rank = find(f"{start}model.lora.rank")
    found["lora_rank"] = rank or Given("default", 0)
    if top == "RLConfig":
        found |= _orchestrated(settings, find)
    return found | _gpus(find, top)


Find = Callable[[str], Given | None]


def _orchestrated(settings: Settings, find: Find) -> dict[str, Given]:
    """Batches, the algorithm and its teachers."""
    found: dict[str, Given] = {}
    default = Given("default", None)
    batch = find("orchestrator.batch_size") or default
    group = find("orchestrator.group_size") or default
    if batch.value is None and not batch.needs:
        tokens = find("orchestrator.token_batch_size") or default
        # configs/orchestrator.py, resolve_batching
        is_known = tokens.value is None and not tokens.needs
        batch = Given("default", 128) if is_known else default
    sources = settings.get("orchestrator.train.source")
    own = sources if isinstance(sources, list) else []
    is_same = not any(isinstance(one, dict) and "group_size" in one for one in own)
    found["ppo_mini_batch_size"] = batch
    if (batch.value or batch.needs) and is_same:
        found["train_batch_size"] = derived(
            "orchestrator.batch_size / group_size",
            _divided,
            batch,
            group,
        )
    places = ["orchestrator"]
    each = [one.get("algo") if isinstance(one, dict) else None for one in own]
    places += [
        f"orchestrator.train.source.{n}"
        for n, one in enumerate(each)
        if one is not None
    ]
    if own and None not in each:
        places.remove("orchestrator")
    kinds, teachers, urls = [], [], []
    for place in places:
        algo = settings.get(f"{place}.algo")
        algo = algo if isinstance(algo, dict) else {}
        kind = algo.get("type", "grpo")
        key = {"opd": "teacher", "sft": "sampling.source"}.get(str(kind), "")
        kinds.append((kind, f"{place}.algo.type"))
        name = settings.get(f"{place}.algo.{key}.name") if key else None
        if name is not None:
            teachers.append((name, f"{place}.algo.{key}.name"))
            url = settings.get(f"{place}.algo.{key}.base_url")
            urls.append((url, f"{place}.algo.{key}.base_url"))
    found["loss"] = _one(settings, kinds)
    if teachers:
        found["teacher"] = _one(settings, teachers)
    if len({str(url) for url, _ in urls}) == 1 and isinstance(urls[0][0], str):
        try:
            parts = urlsplit(urls[0][0])
            port = parts.port
        except ValueError:
            return found
        word = settings.word(urls[0][1])
        found["teacher_server_ip"] = Given("user", parts.hostname, word)
        if port:
            found["teacher_server_port"] = Given("user", port, word)
    return found


def _one(settings: Settings, told: Iterable[tuple[Any, str]]) -> Given:
    """The value that several places give; a list of them if they differ."""
    pairs = list(told)
    needs = NOBODY.union(*(v.needs for v, _ in pairs if isinstance(v, Uncertain)))
    if needs:
        return Given("undetermined", needs=needs)
    values = list({str(value): value for value, _ in pairs}.values())
    keys = [key for _, key in pairs if settings.get(key) is not None]
    word = settings.word(keys[0]) if keys else None
    source = "user" if keys else "default"
    return Given(source, values[0] if len(values) == 1 else values, word)


def _gpus(find: Find, top: str) -> dict[str, Given]:
    """Which role gets which GPUs (entrypoints/rl.py; configs/rl.py and sft.py)."""
    found: dict[str, Given] = {}
    none = Given("default", 0)
    each = find("deployment.gpus_per_node") or none
    inference = find("inference")
    has_inference = inference is not None and inference.value is not None
    kind = find("deployment.type")
    if kind and kind.value == "multi_node":
        nodes = find("deployment.num_train_nodes") or none
        found["trainer_gpus"] = derived("nodes * gpus_per_node", _times, nodes, each)
        rollout = _inference_nodes(find) if has_inference else none
        if top == "RLConfig":
            replicas = find("deployment.num_infer_replicas") or none
            rollout = derived("nodes of all replicas", _times, rollout, replicas)
        found["nodes"] = derived("of trainer and inference", _plus, nodes, rollout)
        gpus = derived("nodes * gpus_per_node", _times, rollout, each)
    else:
        found["trainer_gpus"] = find("deployment.num_train_gpus") or none
        gpus = (find("deployment.num_infer_gpus") or none) if has_inference else none
        found["nodes"] = Given("default", 1)
    found["rollout_gpus"], found["gpus_per_node"] = gpus, each
    if top == "RLConfig":
        text = "another server's"
        found["teacher_gpus"] = Given("default", 0, expression=text)
    if has_inference:
        found["rollout_engine"] = Given("default", "vllm")
        found["placement"] = Given("default", "split")
    parts = (found["trainer_gpus"], gpus)
    found["total_gpus"] = derived("of trainer and inference", _plus, *parts)
    return found


def _inference_nodes(find: Find) -> Given:
    """configs/rl.py, auto_setup_infer_nodes; configs/inference.py, num_nodes."""
    given = find("deployment.num_infer_nodes")
    if given is not None and (given.value is not None or given.needs):
        return given
    kind = find("inference.deployment.type")
    start = "inference.deployment."
    if kind and kind.value == "multi_node":
        return find(f"{start}num_nodes") or Given("default", 2)
    if kind and kind.value == "disaggregated":
        keys = ("prefill_nodes_per_replica", "num_prefill_replicas")
        more = ("decode_nodes_per_replica", "num_decode_replicas")
        parts = [find(f"{start}{key}") or Given("default", 1) for key in (*keys, *more)]
        return derived("prefill and decode", lambda a, b, c, d: a * b + c * d, *parts)
    return Given("default", 1)


def _divided(size: Any, each: Any) -> Any:
    is_whole = type(size) is int and type(each) is int and each > 0
    return size // each if is_whole else None


def _times(one: Any, other: Any) -> Any:
    is_whole = type(one) is int and type(other) is int
    return one * other if is_whole else None


def _plus(one: Any, other: Any) -> Any:
    is_whole = type(one) is int and type(other) is int
    return one + other if is_whole else None
