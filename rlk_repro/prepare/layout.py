"""Name every folder below a site's ``prepared_dir``; no other module knows these names.

All nodes must see ``prepared_dir`` under the same path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.files import dump_json, sha256_bytes
from rlk_repro.prepare.made_data import RandomRollouts
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.spec import ArithmeticData, HubData, HubSource, PackageSource, Profile, Run, VimeModel, VimeWorkload

HERE: Final = "prepared"
_SHOWN: Final = 12


@dataclass(frozen=True)
class PreparedDir:
    root: Path

    @classmethod
    def of(cls, profile: Profile, run_dir: RunDir) -> PreparedDir:
        """Return the profile's ``prepared_dir``, by default ``prepared`` in the folder that holds all runs."""
        if profile.prepared_dir is not None:
            return cls(Path(profile.prepared_dir))
        return cls(run_dir.root.absolute().parent.parent / HERE)

    def model(self, model: VimeModel) -> Path:
        """Return the model's folder in the hub's format (``--hf-checkpoint``)."""
        return self.root / "models" / name_model(model)

    def checkpoint(self, model: VimeModel, vime_commit: str) -> Path:
        """Return the folder of the weights that vime of this commit converted (``--ref-load``)."""
        made_of = _digest({"model": name_model(model), "arguments": dict(model.arguments), "vime": vime_commit})
        return self.root / "checkpoints" / f"{name_model(model)}.torch_dist-{made_of}"

    def data_folder(self, source: HubData | ArithmeticData) -> Path:
        if isinstance(source, HubData):
            name = name_repository(source.repository, source.revision)
        else:
            name = f"arithmetic-{source.num_prompts}-{source.max_operand}-{source.seed}"
        return self.root / "datasets" / name

    def data_file(self, source: HubData | ArithmeticData) -> Path:
        """Return the file of the prompts (``--prompt-data``)."""
        return self.data_folder(source) / (source.file if isinstance(source, HubData) else "prompts.jsonl")

    def rollouts(self, run: Run, workload: VimeWorkload) -> RolloutDir | None:
        """Return the folder of stored rollouts, or None if the run generates rollouts or stores them itself."""
        if run.lane == "live":
            return None
        if (made := RandomRollouts.of(run, workload)) is not None:
            return RolloutDir(self.root / "rollouts" / f"random-{_digest(made.recipe)}")
        return None if workload.rollouts is None else RolloutDir(self.root / "rollouts" / workload.rollouts.name)


def name_model(model: VimeModel) -> str:
    source = model.source
    if isinstance(source, HubSource):
        return name_repository(source.repository, source.revision)
    if isinstance(source, PackageSource):
        return f"{source.name}-{source.version}-{_digest(source.model_dump(mode='json'))}"
    made_of = _digest({"source": source.model_dump(mode="json"), "arguments": dict(model.arguments)})
    return f"random-{source.architecture}-{made_of}"


def name_repository(repository: str, revision: str | None) -> str:
    return f"{repository.replace('/', '--')}@{'unpinned' if revision is None else revision[:_SHOWN]}"


def _digest(made_of: dict[str, Any]) -> str:
    return sha256_bytes(dump_json(made_of))[:_SHOWN]
