"""What a Slurm site and its container runtime need: the ``slurm`` and ``container`` parts of a profile.

Values only; ``clusters.slurm`` makes a script of them and refuses what a runtime cannot express.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlk_repro.spec.values import UNSEEN, GrowingModel, Model, Positive, Word

Line = Annotated[str, Field(pattern=rf"^[^{UNSEEN}]+$", max_length=1000)]
"""Text of one line: options of sbatch stand in comment lines, where a line feed would begin a command."""
AbsolutePath = Annotated[str, Field(pattern=rf"^/[^{UNSEEN}]*$", max_length=1000)]
Gres = Annotated[str, Field(pattern=r"^(none|gpu(:[A-Za-z0-9._-]+)?)$", max_length=100)]
Option = Annotated[str, Field(pattern=rf"^--?[A-Za-z][^{UNSEEN}]*$", max_length=1000)]


class SlurmSettings(Model):
    """How a job is asked for at this site.  What is not set is left to Slurm's own defaults."""

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    constraint: Word | None = None
    exclude: Word | None = Field(None, description="nodes that are never to be used, as Slurm writes node lists")
    gres: Gres = Field("gpu", description="how GPUs are asked for: gpu, gpu:TYPE, or none where nodes come whole")
    exclusive: bool = Field(True, description="whole nodes with all their memory; anything else measures neighbours")
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="nodes of one NVLink domain where the site has block topology (18 for NVL72); sets --segment"
    )
    max_time_min: Positive | None = Field(None, description="longest job this partition takes")
    stop_before_s: Annotated[int, Field(ge=60, le=3600)] = Field(
        300, description="the agents are asked to stop this long before the time limit"
    )
    requeue: bool = Field(True, description="let Slurm start the job again after a node failure or preemption")
    setup: tuple[Line, ...] = Field(
        (), description="shell lines of this site, such as 'module load …'; run as they are"
    )
    extra: tuple[Option, ...] = Field((), description="further options of sbatch, passed on as they are")
    srun_extra: tuple[Option, ...] = Field((), description="further options of srun, passed on as they are")


class Mount(Model):
    """A folder or device of the host that the container sees."""

    source: AbsolutePath
    target: AbsolutePath | None = Field(None, description="default: the same path")
    read_only: bool = False


class ContainerSettings(GrowingModel):
    """What starts the image of the stack on a node; ``host`` starts none and uses what the node has."""

    added_later: ClassVar[frozenset[str]] = frozenset({"fabric", "host_python"})

    runtime: Literal["host", "pyxis", "apptainer", "podman", "docker"] = "host"
    python: Word = Field(
        "python3", description="the interpreter that has rlk_repro, inside the container or on the host"
    )
    host_python: Word | None = Field(
        None, description="the nodes' interpreter for stacks without images, where runtime is a container's"
    )
    package_dir: AbsolutePath | None = Field(
        None, description="folder that holds the rlk_repro package, put first on PYTHONPATH; default: the installed one"
    )
    image_dir: AbsolutePath | None = Field(
        None, description="shared folder where pyxis and apptainer keep imported images; each is imported once"
    )
    mounts: tuple[Mount, ...] = Field((), description="besides the run directory, which is always mounted")
    extra: tuple[Option, ...] = Field((), description="further options of the runtime, passed on as they are")
    fabric: tuple[AbsolutePath, ...] = Field(
        ("/dev/infiniband",), description="devices of the network between nodes, for runs on several of them"
    )
