"""Define the command line, and print all errors."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import typer

from rlk_repro import __version__
from rlk_repro.base.disk import OF_FILE_SYSTEMS, Unwritable
from rlk_repro.base.errors import EXIT_BUG, EnvironmentMissing, Problem, RlkReproError
from rlk_repro.base.escapes import escape_json, printable, printable_lines
from rlk_repro.cli import (
    bundles,
    combine,
    images,
    jobs,
    prepare,
    profile,
    replay,
    report,
    runs,
    submit,
)
from rlk_repro.cli.commands import EXAMPLES, REMOVED, CommandGroup, as_typed

PARSER_REFUSED: Final = 2

Functions: TypeAlias = Mapping[str, Callable[..., None]]

COMMANDS: Final[Functions] = {
    "submit": submit.submit,
    "status": jobs.status,
    "logs": jobs.logs,
    "cancel": jobs.cancel,
    "collect": jobs.collect,
    "list": runs.list_kinds,
    "verify": bundles.verify,
    "inspect": bundles.inspect,
    "diff": bundles.diff,
    "combine": combine.combine,
    "predict": combine.predict,
    "replay": replay.replay,
    "report": report.report,
    "index": report.index,
    "agreement": report.agreement,
    "prepare": prepare.prepare,
    "doctor": profile.doctor,
}
GROUPS: Final[Mapping[str, tuple[str, Functions]]] = {
    "runs": ("Run definitions: list them, show one.", {"list": runs.list_runs, "show": runs.show_run}),
    "profile": (
        "Site profiles: write one for a cluster, show it, check it.",
        {"init": profile.init, "show": profile.show, "check": profile.check},
    ),
    "images": ("Container images of stacks: build.", {"build": images.build}),
    "env": (
        "Stacks as virtual environments, for hosts without containers: create, check, export.",
        {"create": images.create, "check": images.check, "export": images.export},
    ),
}

READING: Final = [
    *(["verify"], ["inspect"], ["report"], ["combine"], ["diff"], ["index"], ["agreement"], ["runs"], ["list"]),
    ["profile", "show"],
]
SHOWING: Final = {"replay": {"--analyze-only"}, "submit": {"--dry-run"}}
"""Commands, and options of commands, that need no Linux."""

app: Final = typer.Typer(
    name="rlk-repro",
    cls=CommandGroup,
    help="Measure whether RL-Kernel makes vime's GRPO training faster or saves memory; others can check the evidence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"rlk-repro {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    del version


for name, function in COMMANDS.items():
    app.command(name)(function)
for name, (purpose, members) in GROUPS.items():
    group = typer.Typer(cls=CommandGroup, help=purpose, no_args_is_help=True)
    app.add_typer(group, name=name)
    for command, function in members.items():
        group.command(command)(function)


@cache
def make_command() -> Any:
    """Make the parser of all commands, once per process: this takes 0.1 s."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line; a known error gives its exit code, and any other error is reported as a bug."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal's encoding lacks must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _require_linux(sys.argv[1:])
        make_command()(prog_name="rlk-repro")
    except SystemExit as end:
        if end.code == PARSER_REFUSED:
            _show_hint()
        raise
    except RlkReproError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        found = _explain(error)
        if found is None:
            sys.exit(_report_bug())
        _print_error(found)
        sys.exit(found.exit_code)
    except Exception:  # noqa: BLE001  every unknown error is a bug
        sys.exit(_report_bug())


def _require_linux(words: list[str]) -> None:
    """Refuse commands that start, follow or probe a run on macOS and Windows, where only the others are tested."""
    is_known = words[:1] and words[0] in {*COMMANDS, *GROUPS} and not {"-h", "--help"} & {*words}
    if sys.platform == "linux" or not is_known or words[:1] in READING or words[:2] in READING:
        return
    if SHOWING.get(words[0], set()) & {*words}:
        return
    hint = f"here work: {', '.join(' '.join(known) for known in READING)}; replay --analyze-only; submit --dry-run"
    raise EnvironmentMissing(Problem(words[0], "needs Linux", got=sys.platform, hint=hint))


def _open_closed_streams() -> None:
    """Open standard streams that are closed: the next file would get such a stream's number, and lose its content."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # the kernel gives it the lowest free number, which is that of the closed stream
            setattr(sys, name, Path(os.devnull).open("w" if number else "r"))  # noqa: SIM115


def _explain(error: OSError) -> RlkReproError | None:
    """Return what the user must change, or None if the error is a bug."""
    if error.errno in OF_FILE_SYSTEMS:
        return Unwritable.at(Path(error.filename or tempfile.gettempdir()), error)  # a library could not write a file
    if isinstance(error, PermissionError) and error.filename:
        return EnvironmentMissing(Problem(str(error.filename), f"cannot be read or written ({error.strerror})"))
    if isinstance(error, FileNotFoundError) and error.filename is None:  # from os.getcwd
        return EnvironmentMissing(Problem("the current folder", "was deleted", hint="cd to another folder"))
    return None


def _show_hint() -> None:
    for name in (" ".join(sys.argv[1:3]), " ".join(sys.argv[1:2])):
        if name in REMOVED:
            sys.stderr.write(f"  hint: {name} was removed in version 0.3; {REMOVED[name]}\n")
            return
        if name in EXAMPLES:
            sys.stderr.write(f"  example: {as_typed(EXAMPLES[name])}\n")
            return


def _print_error(error: RlkReproError) -> None:
    if "--json" in sys.argv:
        from rlk_repro.base.files import dump_json

        problems = [str(problem) for problem in error.problems]
        value = {"error": error.title, "exit_code": error.exit_code, "problems": problems}
        sys.stderr.write(escape_json(dump_json(value).decode()))
        return
    for problem in error.problems:
        sys.stderr.write(f"rlk-repro: {as_typed(str(problem))}\n")


def _report_bug() -> int:
    import traceback

    text = traceback.format_exc()
    record = f"rlk-repro {__version__}, Python {sys.version}\n{' '.join(sys.argv[1:2])}\n{text}"
    first = printable("".join(traceback.format_exception_only(sys.exc_info()[1])).partition("\n")[0])
    try:
        with tempfile.NamedTemporaryFile("w", prefix="rlk-repro-crash-", suffix=".log", delete=False) as stream:
            stream.write(record)
        sys.stderr.write(f"rlk-repro: this is a bug: {first}\n  hint: please report it and attach {stream.name}\n")
    except OSError:  # the disk has no room for the file
        sys.stderr.write(f"rlk-repro: this is a bug: {first}\n{printable_lines(record)}\n")
    return EXIT_BUG
