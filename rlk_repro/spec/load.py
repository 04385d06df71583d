"""Turn a YAML file (and ``--set``) into a model, or report all its problems, each with its line and a hint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlk_repro.base import resources
from rlk_repro.base.errors import Problem, SpecError, shorten
from rlk_repro.base.resources import data_dir, display_name, find_yaml, suggest
from rlk_repro.base.secrets import looks_secret
from rlk_repro.base.yamlfile import Path_, YamlSource, format_path, parse_scalar, parse_yaml
from rlk_repro.spec import Hardware, Profile, Run, Stack, run_problems
from rlk_repro.spec.site import REMOVED_CHECKS, REMOVED_LIMITS
from rlk_repro.spec.stack import stack_problems
from rlk_repro.spec.values import PathProblem, dump_model, list_leaves

M = TypeVar("M", bound=BaseModel)
_parse_once: Final = lru_cache(maxsize=64)(parse_yaml)  # one command reads the same files several times
_OWN_RAY: Final = "delete the key: the agents start Ray themselves, in a Job"
REMOVED: Final = {
    "all_reduce": "delete the key; nccl-tests measures the fabric",
    "kubernetes.hold_min": "delete the key: results are on the claim, results.claim",
    "kubernetes.kind": _OWN_RAY,
    "kubernetes.operator_namespace": _OWN_RAY,
    "kubernetes.ray_version": _OWN_RAY,
    **dict.fromkeys([f"preflight.{key}" for key in REMOVED_LIMITS], "delete the key"),
    **dict.fromkeys([f"preflight.policy.{name}" for name in REMOVED_CHECKS], "delete the key"),
}
"""Keys of earlier versions' files, and what to do; plans and bundles with them stay readable."""


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A parsed file and its bytes; ``origin`` maps the dotted path of a value to the flag or line that set it."""

    model: M
    data: bytes
    origin: Mapping[str, str]

    @property
    def sources(self) -> dict[str, str]:
        """Map each dotted path to its source: a flag, a file and line, or ``default``.

        File names are recorded without folders, so that no path of a machine is recorded.
        """
        dumped = {".".join(path): self._find_source(path) for path in list_leaves(dump_model(self.model))}
        by_flag = {path: source for path, source in self.origin.items() if source.startswith("--")}
        shown = {path for path in by_flag if any(f"{name}.".startswith(f"{path}.") for name in dumped)}
        return dumped | {path: source for path, source in by_flag.items() if path not in shown}

    def _find_source(self, path: Sequence[str]) -> str:
        places = [".".join(path[:length]) for length in range(len(path), 0, -1)]
        flag = next((self.origin[place] for place in places if self.origin.get(place, "").startswith("--")), None)
        return flag or self.origin.get(places[0], "default").rpartition("/")[2]


@dataclass(frozen=True)
class Override:
    """One ``--set path=value``, or a flag such as ``--pairs``; errors name ``flag``, the option that the user typed."""

    path: tuple[str, ...]
    value: Any
    flag: str


def parse_overrides(settings: Iterable[str]) -> list[Override]:
    """Turn texts such as ``measure.pairs=8`` into overrides; the values are YAML scalars or flow collections.

    Raises:
        SpecError: a text has no ``=``, an empty path, an unreadable value, or something that looks like a secret.
    """
    overrides, problems = [], []
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not all(path.split(".")):
            problems.append(Problem(f"--set {shorten(repr(setting), 60)}", "not of the form path=value",
                                    expected="for example measure.pairs=8"))  # fmt: skip
            continue
        secret = looks_secret(path.rsplit(".", 1)[-1], text)
        if secret is not None:
            problems.append(_secret_problem(f"--set {path}", secret))
            continue
        try:
            overrides.append(Override(tuple(path.split(".")), parse_scalar(text), f"--set {path}"))
        except SpecError as error:
            problems += [Problem(f"--set {path}", item.what, expected=item.expected) for item in error.problems]
    if problems:
        raise SpecError(*problems)
    return overrides


def load_run(name: str, overrides: Sequence[Override] = ()) -> Loaded[Run]:
    return load(Run, find_yaml("run", name, resources.run_folders()), overrides, run_problems)


def load_stack(name: str) -> Loaded[Stack]:
    return load(Stack, find_yaml("stack", name, resources.stack_folders()), check=_check_stack)


def _check_stack(stack: Stack) -> list[PathProblem]:
    """Megatron-LM and its patch must match the argument contract of the stack's vime commit, if a contract exists."""
    problems = stack_problems(stack)
    pin = stack.pins.get("vime")
    path = data_dir("manifests") / "contracts" / f"vime-{pin.commit if pin else ''}.json"
    if not path.is_file():
        return problems
    contract = _read_contract(path)
    megatron, patch = stack.pins.get("megatron_lm"), stack.components.get("megatron-patch")
    held: list[tuple[tuple[str, ...], str | None, str]] = [
        (("pins", "megatron_lm", "commit"), megatron.commit if megatron else None, "megatron_lm"),
        (("components", "megatron-patch", "sha256"), patch.sha256 if patch else None, "megatron_patch"),
    ]
    return problems + [
        (where, f"differs from the value recorded in {path.name}", found, str(contract.get(key)))
        for where, found, key in held
        if found is not None and found != contract.get(key)
    ]


@cache
def _read_contract(path: Path) -> Any:
    return json.loads(path.read_bytes())


def load_hardware(name: str) -> Loaded[Hardware]:
    return load(Hardware, find_yaml("hardware", name, resources.hardware_folders()))


def load_profile(
    name: str, folders: list[Path], clusters: Collection[str] = (), overrides: Sequence[Override] = ()
) -> Loaded[Profile]:
    """Load a profile by name or file; if ``clusters`` is not empty, require one of them."""

    def check(profile: Profile) -> list[PathProblem]:
        problems: list[PathProblem] = []
        if clusters and profile.cluster not in clusters:
            problems.append((("cluster",), "unknown", profile.cluster, f"one of {', '.join(clusters)}"))
        for block, cluster in (("slurm", "slurm"), ("kubernetes", "k8s")):
            if getattr(profile, block) is not None and profile.cluster != cluster:
                problems.append(((block,), "has no effect", f"cluster: {profile.cluster}", f"cluster: {cluster}"))
        if profile.gpus and profile.cluster != "local":
            got, expected = f"cluster: {profile.cluster}", "cluster: local; a scheduler assigns GPUs itself"
            problems.append((("gpus",), "has no effect", got, expected))
        return problems

    return load(Profile, find_yaml("profile", name, folders), overrides, check)


def load(
    model: type[M],
    path: Path,
    overrides: Sequence[Override] = (),
    check: Callable[[M], list[PathProblem]] | None = None,
) -> Loaded[M]:
    """Read a file into a model; raise SpecError, which lists every problem of the file."""
    name = display_name(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(Problem(name, f"cannot be read ({error.strerror})")) from error
    loaded = load_bytes(model, name, data, overrides, check)
    source = _parse_once(name, data)
    what, problems = "was removed in version 0.3", []
    for place in source.lines:
        if hint := REMOVED.get(format_path(place)):
            problems.append(Problem(source.where(place), what, hint=hint))
    if problems:
        raise SpecError(*problems)
    return loaded


def load_bytes(
    model: type[M],
    name: str,
    data: bytes,
    overrides: Sequence[Override] = (),
    check: Callable[[M], list[PathProblem]] | None = None,
) -> Loaded[M]:
    source = _parse_once(name, data)
    if not isinstance(source.value, dict):
        raise SpecError(Problem(name, "not a mapping", got=source.value, expected="keys and values"))
    problems = _secret_problems(source)
    value, origin = _apply(source, overrides)
    where = _Locator(source, {override.path: override.flag for override in overrides})
    try:
        result = model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        found = error.errors()
        problems += [
            _problem(model, value, details, where)
            for details in found
            if not _is_other_form(details) and not _is_consequence(details, found)
        ]
        raise SpecError(*problems) from None
    if check is not None:
        for path, what, got, expected in check(result):
            indexed = tuple(int(part) if part.isdigit() else part for part in path)
            problems.append(Problem(where(indexed), what, got=got, expected=expected))
    if problems:
        raise SpecError(*problems)
    return Loaded(result, data, origin)


class _Locator:
    def __init__(self, source: YamlSource, flags: Mapping[tuple[str, ...], str]) -> None:
        self.source, self.flags = source, flags

    def __call__(self, path: Path_) -> str:
        text = tuple(str(part) for part in path)
        for length in range(len(text), 0, -1):
            if text[:length] in self.flags:
                return ": ".join(filter(None, [self.flags[text[:length]], format_path(path[length:])]))
        if path and path not in self.source.lines:
            below = [flag for written, flag in self.flags.items() if written[: len(text)] == text]
            if below:
                return below[0]
        return self.source.where(path)


def _apply(source: YamlSource, overrides: Sequence[Override]) -> tuple[Any, dict[str, str]]:
    value = copy.deepcopy(source.value)
    replaced = {override.path for override in overrides}
    origin = {
        format_path(path): f"{source.name}:{line}"
        for path, line in source.lines.items()
        if path and not any(path[:length] in replaced for length in range(1, len(path)))
    }
    for override in overrides:
        target = value
        for part in override.path[:-1]:
            inner = target.get(part) if isinstance(target, dict) else None
            if inner is None and isinstance(target, dict):
                inner = target[part] = {}
            target = inner
        if not isinstance(target, dict):
            raise SpecError(Problem(override.flag, "there is no such path", expected="a path such as measure.pairs"))
        if override.path[-1] in target and target[override.path[-1]] == override.value:
            continue
        target[override.path[-1]] = override.value
        origin[".".join(override.path)] = override.flag
    return value, origin


def _problem(model: type[BaseModel], value: Any, details: ErrorDetails, where: _Locator) -> Problem:
    path, known = _follow(model, value, details["loc"])
    kind, found = details["type"], details["input"]
    if kind in _TAG_ERRORS:
        path, found = (*path, _TAG), found.get(_TAG)
    if kind == "extra_forbidden":
        return Problem(where(path), "unknown key", expected=f"one of {', '.join(known)}" if known else None,
                       hint=suggest(str(path[-1]), known))  # fmt: skip
    if kind in {"missing", "union_tag_not_found"}:
        return Problem(where(path), "missing", expected="a value")
    expected, hint = _expected(details), None
    if kind in {"literal_error", "union_tag_invalid"} and isinstance(found, str):
        hint = suggest(found, [word.strip("' ") for word in expected.replace(" or ", ",").split(",")])
    elif kind == "string_type" and isinstance(found, int | float):
        hint = f'quote it: "{found}"'
    if hint is None and where(path).startswith("--set "):
        hint = "rlk-repro runs show RUN prints every key and its value"
    return Problem(where(path), "wrong value", got=found, expected=expected, hint=hint)


def _is_other_form(details: ErrorDetails) -> bool:
    """An error concerns one form, text or ``{from_env: NAME}``; tell whether the author wrote the other form."""
    forms = {*_TEXT_NAMES, "FromEnv"} & {str(part) for part in details["loc"][-2:]}
    if not forms:
        return False
    is_mapping = isinstance(details["input"], dict) or "FromEnv" in details["loc"][-2:-1]  # a key of the mapping
    return is_mapping == bool(forms & _TEXT_NAMES)


def _is_consequence(details: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """If every entry of a list is wrong, Pydantic also reports the list as too short."""
    location = details["loc"]
    return details["type"] == "too_short" and any(
        item["loc"][: len(location)] == location and item is not details for item in errors
    )


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "union_tag_invalid":
        *others, last = context["expected_tags"].split(", ")
        return f"{', '.join(others)} or {last}"
    if kind == "string_pattern_mismatch":
        return f"text matching {context['pattern']}"
    if kind == "too_short":
        return f"at least {context['min_length']} entry"
    return _EXPECTED.get(kind) or str(details["msg"]).removeprefix("Input should be ")


_TAG: Final = "kind"
_TAG_ERRORS: Final = frozenset({"union_tag_not_found", "union_tag_invalid"})

_EXPECTED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


def _follow(model: type[BaseModel], value: Any, location: tuple[int | str, ...]) -> tuple[Path_, list[str]]:
    """Return where a location of pydantic lies in the file, and the keys that are known beside it.

    The location also has the names of union members, which are not keys of the file.
    """
    path: list[int | str] = []
    current: Any = model
    known: Sequence[type[BaseModel]] = ()
    for index, part in enumerate(location):
        if _has(value, part):
            known = _models(current, value)
            current, value = _step(known, current, str(part)), value[part]
            path.append(part)
        elif index == len(location) - 1 and isinstance(value, dict) and str(part) not in _NO_KEYS:
            path.append(part)
    fields = known[0].model_fields if known else {}
    return tuple(path), [field.alias or name for name, field in fields.items()]


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


_TEXT_NAMES: Final = frozenset({"str", "constrained-str"})
_NO_KEYS: Final = frozenset({*_TEXT_NAMES, "int", "float", "bool", "FromEnv", "[key]"})


def _step(models: Iterable[type[BaseModel]], annotation: Any, key: str) -> Any:
    for item in models:
        for name, field in item.model_fields.items():
            if key in (name, field.alias):
                return field.annotation
    for item in _members(annotation):
        if get_origin(item) in (dict, tuple, list):
            arguments = get_args(item)
            return arguments[1] if get_origin(item) is dict else arguments[0]
    return None


def _models(annotation: Any, value: Any) -> list[type[BaseModel]]:
    models = [item for item in _members(annotation) if isinstance(item, type) and issubclass(item, BaseModel)]
    tag = value.get(_TAG) if isinstance(value, dict) else None
    if len(models) < 2:
        return models
    return [
        item for item in models if _TAG in item.model_fields and tag in get_args(item.model_fields[_TAG].annotation)
    ]


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [inner for item in get_args(annotation) for inner in _members(item)]
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return [annotation]


def _secret_problems(source: YamlSource) -> list[Problem]:
    problems = []
    for path in source.lines:
        value = source.value
        for part in path:
            value = value[part]
        name = str(path[-1]) if path else ""
        if name == "from_env" or not isinstance(value, str):
            continue
        if path[:2] == ("kubernetes", "secrets"):  # the name of a Secret, and a key in it
            name = ""
        reason = looks_secret(name, value)
        if reason is not None:
            problems.append(_secret_problem(source.where(path), reason))
    return problems


def _secret_problem(where: str, reason: str) -> Problem:
    return Problem(where, f"looks like a secret ({reason})", expected="the name of a variable that holds it",
                   hint="write from_env: NAME and export NAME in your shell")  # fmt: skip
