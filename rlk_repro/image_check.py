"""Check whether this container is the image that its record describes: ``python -m rlk_repro.image_check``.

The exit code is 0 if the container is that image, 1 if it differs, and 3 outside images of rlk-repro.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from rlk_repro.base.errors import EnvironmentMissing, RlkReproError
from rlk_repro.base.files import dump_json
from rlk_repro.base.findings import Finding, Level, has_blocking, sort_findings
from rlk_repro.images.running import check_running, read_record
from rlk_repro.probes import code
from rlk_repro.probes.installed import find_changed_files
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.spec import Stack
from rlk_repro.spec.load import load_stack


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.image_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stack", help="check the image against this stack (name or file)")
    parser.add_argument("--platform", help="require this platform, such as cuda-arm64")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(argv)
    try:
        stack = load_stack(options.stack).model if options.stack else None
        return _report(check(stack, options.platform), as_json=options.json)
    except RlkReproError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def check(stack: Stack | None, platform: str | None) -> list[Finding]:
    own = list(_check_own_package())
    return sort_findings([*own, *check_running(code.probe(), stack, platform, is_required=True)])


def _check_own_package() -> Iterator[Finding]:
    """Check that the package's files are unchanged: newer RL-Kernel also installs a command ``rlk-repro``."""
    try:
        distribution = metadata.distribution("rlk-repro")
    except metadata.PackageNotFoundError:
        yield Finding(Level.BLOCKING, "rlk_repro", "an installed package", "none")
        return
    changed = find_changed_files(distribution, "rlk_repro")
    if changed:
        found = str(changed) if isinstance(changed, Unknown) else ", ".join(item.split()[0] for item in changed[:5])
        yield Finding(Level.BLOCKING, "rlk_repro", "the files that were installed", found)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    record = _describe()
    is_ok = not has_blocking(findings)
    if as_json:
        value = {"is_ok": is_ok, "image": record, "findings": [finding.to_json() for finding in findings]}
        sys.stdout.write(dump_json(value).decode())
    else:
        sys.stdout.writelines(f"  {finding}\n" for finding in findings)
        sys.stdout.write(f"{record}: {'matches its record' if is_ok else 'must not be used'}\n")
    return 0 if is_ok else 1 if not record.startswith("not ") else EnvironmentMissing.exit_code


def _describe() -> str:
    try:
        record = read_record()
    except RlkReproError:
        return "an image with an unreadable record"
    if isinstance(record, Unknown):
        return "not an image of rlk-repro"
    return f"image of stack {record.stack} for {record.platform}"


if __name__ == "__main__":
    sys.exit(main())
