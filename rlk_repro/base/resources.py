"""Find the shipped runs, hardware, stacks and profiles: in the package (wheel), or beside the package (checkout)."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError

PACKAGE = Path(__file__).resolve().parent.parent


def data_dir(name: str) -> Path:
    packaged = PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def display_name(path: Path) -> str:
    """Return a file's name for messages: the path in the project for a shipped file, else the user's path."""
    absolute = path.resolve()
    for base in (PACKAGE / "_data", PACKAGE.parent, Path.cwd()):
        if absolute.is_relative_to(base):
            return str(absolute.relative_to(base))
    return str(path)


def home_dir() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise EnvironmentMissing(
            Problem("HOME", "is not set, and this user has no home folder", hint="export HOME=/a/folder")
        ) from None


def user_profiles_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or home_dir() / ".config") / "rlk-repro" / "profiles"


def user_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or home_dir() / ".local" / "state") / "rlk-repro"


def user_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home_dir() / ".cache") / "rlk-repro"


def list_names(folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})


def find_yaml(kind: str, name: str, folders: list[Path]) -> Path:
    """Find a file by its path or by its name in ``folders``; raise SpecError if it is absent or unreadable."""
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    candidates = [Path(name)] if is_path else [folder / f"{name}.yaml" for folder in folders]
    try:
        found = next((path for path in candidates if path.is_file()), None)
    except OSError as error:
        raise SpecError(Problem(f"--{kind}: {error.filename}", f"cannot be read ({error.strerror})")) from error
    if found is not None:
        return found
    hint = "rlk-repro list hardware" if kind == "hardware" else f"rlk-repro list {kind}s"
    if is_path:
        raise SpecError(Problem(f"--{kind}", "no such file", got=name, expected=f"a {kind} file", hint=hint))
    known = list_names(folders)
    if kind == "hardware" and known and name.lower() not in known:
        example = folders[0] / f"{(_find_near(name, tuple(known)) or known)[0]}.yaml"
        hint = f"to add hardware, copy {example}, change its values and give its path"
    else:
        hint = suggest(name.lower(), known) or hint
    expected = f"one of {', '.join(known) or '(none)'}"
    raise SpecError(Problem(f"--{kind}", f"no {kind} of this name", got=name, expected=expected, hint=hint))


def suggest(name: str, known: list[str]) -> str | None:
    near = _find_near(name, tuple(known))
    return f"did you mean '{near[0]}'?" if near else None


@lru_cache(maxsize=1024)
def _find_near(name: str, known: tuple[str, ...]) -> list[str]:
    from difflib import get_close_matches

    family = sorted((item for item in known if name and item.startswith(name)), key=len)
    return family[:1] or get_close_matches(name, known, n=1, cutoff=0.5)


def run_folders() -> list[Path]:
    return [data_dir("jobs")]


def hardware_folders() -> list[Path]:
    return [data_dir("jobs") / "hardware"]


def stack_folders() -> list[Path]:
    return [data_dir("manifests") / "stacks"]


def profile_folders(cluster: str) -> list[Path]:
    shipped = data_dir("jobs") / "profiles" if cluster == "local" else data_dir(cluster) / "profiles"
    return [user_profiles_dir(), shipped]


def all_profile_folders() -> list[Path]:
    shipped = [data_dir("jobs"), data_dir("slurm"), data_dir("k8s")]
    return [user_profiles_dir(), *(folder / "profiles" for folder in shipped)]
