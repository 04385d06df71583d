"""The value types that all models share, and the base classes of the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

UNSEEN: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
"""Control, direction and zero-width characters, for use in patterns: no argument or path may hold them."""

REMOVED: Final = "removed in version 0.3; new runs refuse it"
"""What the schemas say of keys that only plans of earlier versions may have."""
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=2000)]
Word: TypeAlias = Annotated[str, Field(pattern=rf"^[^-{UNSEEN}][^{UNSEEN}]*$", max_length=1000)]
"""Text of one line that no program can mistake for an option."""
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=40)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
MAX_SEED: Final = 2**31 - 1
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEED)]
Minutes: TypeAlias = Annotated[float, Field(gt=0, le=10**5)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, le=1e12)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e12)]
Commit: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Repository: TypeAlias = Annotated[
    str,
    Field(
        pattern=r"^https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+$", max_length=300
    ),
]
Digest: TypeAlias = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
EnvName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
EnvValue: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Schema: TypeAlias = Literal[1]
PinName: TypeAlias = Literal["vime", "rl_kernel", "megatron_lm"]
Lane: TypeAlias = Literal["live", "fixed-rollout", "train-only"]
Variant: TypeAlias = Literal["baseline", "enabled"]
BASELINE: Final[Variant] = "baseline"
ENABLED: Final[Variant] = "enabled"
CROSSOVER: Final = "crossover"
"""Name of the design in which each session runs both variants; such a session records it as its ``variant``."""
OCI_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""The architecture names that images use, for each output of ``uname -m``."""

Platform: TypeAlias = Literal["cpu", "cuda", "rocm"]
Mode: TypeAlias = Literal["auto", "require"]
KlLossType: TypeAlias = Literal["k1", "k2", "k3", "low_var_kl"]
EVERY_KEY: Final = {"every_key": True}
"""The context in which ``model_dump`` also gives the keys of ``added_later`` that have their defaults."""

PathProblem: TypeAlias = "tuple[tuple[str, ...], str, Any, str]"


class Model(BaseModel):
    """Base class of all models: no unknown keys, no conversion of types, finite numbers only."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class GrowingModel(Model):
    """Base class of models with keys that plans of older versions lack.

    A key in ``added_later`` is left out while it has its default, so that older plans keep their hashes.
    """

    added_later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out_later_defaults(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            key: value
            for key, value in dump(self).items()
            if info.context == EVERY_KEY
            or key not in self.added_later
            or getattr(self, key) != fields[key].get_default(call_default_factory=True)
        }


def list_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the path of every value in nested mappings; a list counts as one value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from list_leaves(item, (*path, str(key)))
    else:
        yield path


def dump_model(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True)
