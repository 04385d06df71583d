"""Run ``claims check``: measure published claims again, and give each row a result (``Word``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlk_repro import __version__
from rlk_repro.claims.files import Claim
from rlk_repro.claims.judge import judge_claim, list_cells
from rlk_repro.claims.processes import Bench, Measured, measure_claim
from rlk_repro.claims.results import RL_KERNEL, ClaimsCheck
from rlk_repro.probes import code, gpu
from rlk_repro.rundir.manifest import Manifest


def check_claims(
    claims: Sequence[Claim], bench: Bench | None = None, tell: Callable[[str], object] = lambda _: None
) -> ClaimsCheck:
    bench = Bench(env=dict(os.environ)) if bench is None else bench
    facts = Manifest(node="here", sections={gpu.SECTION: gpu.probe(), code.SECTION: code.probe(environ=bench.env)})
    here = _gpu_name(facts)
    measured: dict[str, Measured] = {}
    for number, claim in enumerate(claims, start=1):
        if here and list_cells(claim):
            tell(f"{claim.claim} ({number} of {len(claims)})")
            measured[claim.claim] = measure_claim(claim, bench)
    nothing = Measured(measurements={}, process={})
    process = next((item.process for item in measured.values() if item.process), {})
    return ClaimsCheck(
        version=__version__,
        environment=_with_rl_kernel(facts.to_json()["sections"], process),
        process={name: fact for name, fact in process.items() if name != RL_KERNEL},
        results=tuple(judge_claim(claim, here, measured.get(claim.claim, nothing).measurements) for claim in claims),
    )


def _gpu_name(facts: Manifest) -> str:
    devices: Any = facts.sections[gpu.SECTION]["devices"]
    return str(devices[0].get("name", "a GPU")) if isinstance(devices, list) and devices else ""


def _with_rl_kernel(sections: dict[str, Any], process: Mapping[str, Any]) -> dict[str, Any]:
    if RL_KERNEL not in process:
        return sections
    return sections | {code.SECTION: sections[code.SECTION] | {RL_KERNEL: process[RL_KERNEL]}}
