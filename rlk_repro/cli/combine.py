"""Define ``combine`` and ``predict``: what several machines showed, and what to expect of another machine or step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.bundles import find_bundle
from rlk_repro.cli.commands import HardwareName, PinsName, Settings
from rlk_repro.cli.output import AsJson, say_answer, say_json, show


def combine(
    names: Annotated[list[str], typer.Argument(metavar="BUNDLE...", help="Sealed bundles of one experiment.")],
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Write the forest plot as an HTML page too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Combine bundles of one experiment: one effect per machine, their mean, and what to expect of the next machine."""
    from rlk_repro.base.files import write_text
    from rlk_repro.replay import combine as steps
    from rlk_repro.report.html import render_page
    from rlk_repro.report.terminal import print_sections

    found = steps.combine([find_bundle(name) for name in names])
    sections = steps.make_sections(found)
    if output is not None:
        write_text(output, render_page(sections))
    if as_json:
        say_json(found)
    else:
        show(lambda console: print_sections(sections, console))


def predict(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN|LOG [BUNDLE...]", help="A run, or a log of vime; bundles (.tgz) add constants."),
    ],
    hardware: HardwareName = None,
    stack: PinsName = None,
    settings: Settings = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="With LOG: size of the vocabulary.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="With LOG: tokens that one GPU trains in a step.")] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="With LOG: tokens of a microbatch on one GPU (max_tokens_per_gpu).")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="With LOG: tensor parallel size.")] = None,
    passes: Annotated[int | None, typer.Option(min=0, max=9, help="With LOG: passes without gradient.")] = None,
    has_entropy: Annotated[
        bool | None, typer.Option("--entropy/--no-entropy", help="With LOG: whether vime's entropy metric is computed.")
    ] = None,
    step_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1e-3, help="Time of a step in baseline.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Write the constants of these bundles; predict nothing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how much of a step RL-Kernel saves, from constants that bundles measured; needs no GPU."""
    from rlk_repro import prediction
    from rlk_repro.base.errors import Problem, SpecError

    targets = [name for name in names if not name.endswith(".tgz")]
    measured = []
    for name in names:
        if name not in targets:
            from rlk_repro.replay.combine import measure

            measured.append(measure(find_bundle(name)))
    if output is not None:
        prediction.write_measured(measured, output)
        say_answer({"files": [str(output)]}, str(output), as_json=as_json)
        return
    if len(targets) != 1:
        raise SpecError(Problem("RUN|LOG", "name one", got=", ".join(targets) or "none"))
    measured += [row for row in prediction.load_measured() if row.bundle not in {own.bundle for own in measured}]
    path = Path(targets[0])
    if path.suffix not in {".yaml", ".yml"} and path.is_file():
        from rlk_repro.spec.load import load_run, load_stack

        usual = load_run(prediction.MODULE_RUN[0], []).model.find_stack(hardware or "")
        given = {"hardware": hardware and hardware.lower(), "vocab": vocab, "tokens": tokens, "microbatch": microbatch,
                 "tp": tp, "passes": passes, "entropy": has_entropy, "step_time": step_time}  # fmt: skip
        shape, step_ms, told = prediction.read_log(path, given, load_stack(stack or usual).model)
        found = prediction.predict(shape, measured, step_ms, told)
    else:
        from rlk_repro.submit.planning import Request, prepare

        request = Request(
            run=targets[0], hardware=hardware, stack=stack, settings=tuple(settings or ()), is_dry_run=True
        )
        found = prediction.predict_plan(prepare(request).plan, measured, step_time and 1000 * step_time)
    say_answer(found, *prediction.describe(found), as_json=as_json)
