"""Format claims, and the results of checks, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlk_repro.base.units import format_number
from rlk_repro.claims.files import Claim, MeasureCheck
from rlk_repro.claims.results import Basis, ClaimResult, ClaimsCheck, Compared, RowResult, Word


def list_lines(claims: Sequence[Claim]) -> Iterator[str]:
    for claim in claims:
        check = "measured" if isinstance(claim.check, MeasureCheck) else f"not runnable: {claim.check.reason}"
        yield f"{claim.claim:<30} {check}"
        yield f"{'':<30} {claim.title}; {claim.testbed.gpu}; {claim.source}"


def check_lines(check: ClaimsCheck) -> Iterator[str]:
    for result in check.results:
        yield from _claim_lines(result)
    if check.process:
        yield f"measured with {', '.join(_list_tools(check))}"
    counts = check.count()
    yield ", ".join(f"{number} {word}" for word, number in counts.items()) + " (rows)"
    if any(_is_elsewhere(result) for result in check.results):
        yield "where the hardware differs from the published one, speed and memory results hold for this machine only"


def _list_tools(check: ClaimsCheck) -> Iterator[str]:
    gpu, code = check.environment["gpu"], check.environment["code"]
    rl_kernel = code["rl_kernel"]
    yield f"{check.process['device']}, driver {_fact(gpu['driver'])}"
    yield f"torch {check.process['torch']}"
    built = "compiled" if rl_kernel["is_compiled"] is True else "without its extension"
    yield f"RL-Kernel at {_fact(rl_kernel['commit'])[:12]} {built}"
    yield f"rlk-repro {check.version} at {_fact(code['rlk_repro']['commit'])[:12]}"


def _fact(fact: Any) -> str:
    return "unknown" if isinstance(fact, dict) else str(fact)


def _claim_lines(result: ClaimResult) -> Iterator[str]:
    yield f"{result.claim}: {result.title}"
    yield f"  published: {result.published_on} ({result.source})"
    yield f"  here:      {result.here}{_hardware_word(result)}"
    if all(not row.compared for row in result.rows) and len({row.reason for row in result.rows}) == 1:
        yield f"  {Word.NOT_RUNNABLE} ({result.rows[0].reason})"
    else:
        for row in result.rows:
            yield from _row_lines(row)
        yield from _first_calls(result)
        yield from (f"  doubt: {doubt}" for doubt in result.doubts)
    yield ""


def _hardware_word(result: ClaimResult) -> str:
    if result.is_same_hardware:
        return ", the published hardware"
    return ", other hardware" if _is_elsewhere(result) else ""


def _is_elsewhere(result: ClaimResult) -> bool:
    return bool(result.measurements) and not result.is_same_hardware


def _row_lines(row: RowResult) -> Iterator[str]:
    yield f"  {row.row:<16} {row.word}" + (f" ({row.reason})" if row.reason else "")
    for item in row.compared:
        if item.here is not None or item.word is Word.NOT_REPRODUCED:
            yield f"    {item.what:<44} {_numbers(item)}"


def _numbers(item: Compared) -> str:
    here = "–" if item.here is None else _with_unit(item.here, item.unit)
    published = "–" if item.published is None else _with_unit(item.published, item.unit)
    text = f"published {published:>10}   here {here:>10}   {item.word}"
    remarks = [item.reason] if item.reason else []
    if item.basis is Basis.ARITHMETIC:
        remarks = [f"{item.basis}: {item.reason}" if item.reason else item.basis]
    if item.warm is not None:
        remarks.append(f"warm {_with_unit(item.warm, item.unit)}")
    return text + (f" ({'; '.join(remarks)})" if remarks else "")


def _with_unit(value: float, unit: str) -> str:
    return f"{format_number(value)} {'×' if unit == 'x' else unit}"


def _first_calls(result: ClaimResult) -> Iterator[str]:
    warm = {(m.cell.row, m.cell.implementation): m.median_s for m in result.measurements if not m.cell.is_cold}
    for item in result.measurements:
        usual = warm.get((item.cell.row, item.cell.implementation))
        if item.cell.is_cold and item.median_s is not None and usual is not None:
            times = f"first call {format_number(item.median_s * 1000)} ms, warm {format_number(usual * 1000)} ms"
            yield f"  {item.cell.row}, {item.cell.implementation}: {times}"
