"""Read the records of engines that a trainer wrote in an agreement run; ``integration.measure.engines`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as record

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema
from rlk_repro.logs.lines import open_log
from rlk_repro.logs.ops_lines import RECORD, Count
from rlk_repro.rundir.agreement import ENGINES
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.spec.agreement import AgreementContract, parse_contract

SCHEMA: Final = 1
MAX_LINE_BYTES: Final = 8 << 20
MAX_LINES: Final = 20_000
MAX_BYTES: Final = 256 << 20
LIMITS: Final = {"case": 16, "step": 1_000, "point": 2_000}

Name: TypeAlias = Annotated[str, Field(max_length=200)]
Token: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# with these limits, sums of squares stay finite
Row: TypeAlias = tuple[Annotated[float, Field(ge=-1e100, le=1e100)] | None, ...]
Rows: TypeAlias = tuple[Row, ...]


@record(**RECORD)
class Begin:
    event: Literal["begin"]
    schema_: Count = Field(alias="schema")
    contract: Annotated[str, Field(max_length=1 << 16)]


@record(**RECORD)
class SampleInput:
    """One input sample of an engine; ``padding`` is the number of positions before its first token."""

    tokens: tuple[Token, ...]
    loss_mask: tuple[Token, ...]
    padding: Count


@record(**RECORD)
class Inputs:
    """The input samples of an engine; ``special`` maps the names of special tokens to their ids."""

    event: Literal["inputs"]
    step: Count
    engine: Name
    samples: tuple[SampleInput, ...]
    special: dict[Name, Token] = Field(default_factory=dict)


@record(**RECORD)
class Weights:
    """Hashes of all tensors of a model, in the model's order, after conversion to the rollout engine's data type.

    ``note`` names tensors of the engine that are not hashed separately.
    """

    event: Literal["weights"]
    step: Count
    engine: Name
    tensors: tuple[tuple[Name, Name], ...]
    note: Name = ""


@record(**RECORD)
class LogProbs:
    """Log-probs of each sample's response tokens; a log-prob that is not finite is None."""

    event: Literal["log_probs"]
    step: Count
    engine: Name
    case: Name
    dtype: Name
    values: Rows


@record(**RECORD)
class Layer:
    """One layer's outputs for some tokens, complete or as random projections; ``norms`` are of the complete outputs."""

    event: Literal["layer"]
    step: Count
    engine: Name
    case: Name
    dtype: Name
    point: Name
    values: Rows
    norms: Row


@record(**RECORD)
class Routing:
    """The chosen experts: for each layer of ``layers``, one tuple of expert ids per token.

    Each token has two indices: that of its sample, and that of the row that predicts the token.  ``is_replayed`` says
    that the engine used the experts recorded in the rollout and did not choose its own.
    """

    event: Literal["routing"]
    step: Count
    engine: Name
    case: Name
    dtype: Name
    tokens: tuple[tuple[Count, Count], ...]
    layers: tuple[Name, ...]
    experts: tuple[tuple[tuple[Token, ...], ...], ...]
    is_replayed: bool = False


@record(**RECORD)
class Skipped:
    event: Literal["skipped"]
    step: Count
    what: Literal["weights", "log_probs", "layers", "routing"]
    engine: Name
    case: Name
    reason: Name


Line: TypeAlias = Begin | Inputs | Weights | LogProbs | Layer | Routing | Skipped
LINES: Final[TypeAdapter[Line]] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


@dataclass(frozen=True, kw_only=True)
class EngineLog:
    """The record of one rank, keyed by step and engine; some fields also by case, which names a way of computing."""

    contract: AgreementContract
    inputs: dict[int, dict[str, Inputs]] = field(default_factory=dict)
    weights: dict[int, dict[str, Weights | Skipped]] = field(default_factory=dict)
    log_probs: dict[int, dict[tuple[str, str], LogProbs | Skipped]] = field(default_factory=dict)
    layers: dict[int, dict[tuple[str, str], dict[str, Layer]]] = field(default_factory=dict)
    lacking_layers: dict[int, dict[tuple[str, str], Skipped]] = field(default_factory=dict)
    routing: dict[int, dict[tuple[str, str], Routing | Skipped]] = field(default_factory=dict)
    num_dropped: int = 0
    names: dict[str, set[str | int]] = field(default_factory=dict, compare=False)

    @property
    def steps(self) -> list[int]:
        return sorted({*self.inputs, *self.weights, *self.log_probs, *self.layers})

    def find_inputs(self, step: int) -> Inputs | None:
        """Return the inputs of a step's first engine; another check fails if the inputs of the engines differ."""
        return next(iter(self.inputs.get(step, {}).values()), None)

    def add(self, line: Inputs | Weights | LogProbs | Layer | Routing | Skipped) -> None:
        """Add a line.

        Raises:
            BundleUnreadable: the record has other engines, or more cases, steps or points than a trainer writes.
        """
        if line.engine not in ENGINES:
            raise BundleUnreadable(Problem("record of engines", "names an unknown engine", got=line.engine))
        for name, limit in LIMITS.items():
            seen = self.names.setdefault(name, set())
            seen.update([getattr(line, name)] if hasattr(line, name) else [])
            if len(seen) > limit:
                raise BundleUnreadable(
                    Problem("record of engines", f"holds too many {name}s", expected=f"at most {limit}")
                )
        match line:
            case Inputs():
                self.inputs.setdefault(line.step, {}).setdefault(line.engine, line)
            case Weights() | Skipped(what="weights"):
                self.weights.setdefault(line.step, {}).setdefault(line.engine, line)
            case Skipped(what="layers"):
                self.lacking_layers.setdefault(line.step, {}).setdefault((line.engine, line.case), line)
            case Routing() | Skipped(what="routing"):
                self.routing.setdefault(line.step, {}).setdefault((line.engine, line.case), line)
            case LogProbs() | Skipped():
                self.log_probs.setdefault(line.step, {}).setdefault((line.engine, line.case), line)
            case Layer():
                points = self.layers.setdefault(line.step, {}).setdefault((line.engine, line.case), {})
                points.setdefault(line.point, line)


def read_engines(folder: TrialDir) -> EngineLog | None:
    """Return the record of a trial's first rank, or None if the trial has no such record.

    Raises:
        BundleUnreadable: the record is too new or too large, holds no agreement contract, or cannot be read.
    """
    path = next(iter(folder.engines_files().values()), None)
    if path is None:
        return None
    log: EngineLog | None = None
    num_dropped = 0
    for line in _read_lines(path):
        num_dropped += line is None
        if isinstance(line, Begin) and log is None:
            check_schema(path.name, {"schema": line.schema_}, SCHEMA)
            log = EngineLog(contract=parse_contract(f"{path.name}: contract", line.contract))
        elif log is not None and line is not None and not isinstance(line, Begin):
            log.add(line)
    return log and replace(log, num_dropped=num_dropped)


def read_contract(folder: TrialDir) -> AgreementContract | None:
    """Return the contract that a trial's first rank recorded, or None if the trial has no such record."""
    path = next(iter(folder.engines_files().values()), None)
    lines = iter(()) if path is None else _read_lines(path)
    begin = next((line for line in lines if isinstance(line, Begin)), None)
    return None if begin is None else parse_contract("contract", begin.contract)


def _read_lines(path: Path) -> Iterator[Line | None]:
    """Yield None for each line that cannot be read; another rule would change the counts in sealed analyses."""
    with open_log(path) as stream:
        for _ in range(MAX_LINES):
            text = stream.readline(MAX_LINE_BYTES)
            if not text:
                return
            if stream.tell() > MAX_BYTES:
                raise BundleUnreadable(Problem(path.name, "is too large", expected=f"at most {MAX_BYTES >> 20} MiB"))
            try:
                yield LINES.validate_json(text)
            except ValueError:
                yield None
        if stream.read(1):
            yield None
