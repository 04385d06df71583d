"""Make the options by which a container runtime starts the stack's image; refuse values that a runtime cannot take."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.slurm.options import slurm_settings
from rlk_repro.images.importing import Import, is_imported, plan_import
from rlk_repro.images.unpublished import image_remarks, shown_image
from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.probes.container import DIGEST_VARIABLE
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ContainerSettings, Image

ENGINES: Final = frozenset({"docker", "podman"})
_AMD_DEVICES: Final = ("/dev/dri", "/dev/kfd")
_IMEX: Final = "/dev/nvidia-caps-imex-channels"
# Ray sets HIP_VISIBLE_DEVICES itself, and does not start if one of these variables differs from it
AMD_VISIBILITY: Final = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
CACHE: Final = "/var/cache/rlk-repro"
"""The path at which Apptainer's containers see a cache folder of the node."""
_CACHES: Final = (
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_HOME",
    "XDG_CACHE_HOME",
)
_PREPEND: Final = 'export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"; exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Bind:
    source: str
    target: str
    is_read_only: bool


def container_settings(plan: Plan) -> ContainerSettings:
    return plan.profile.container or ContainerSettings()


def find_runtime(plan: Plan) -> str:
    """Return the profile's runtime, or ``host`` if the stack has no images and so uses the nodes' own software."""
    return container_settings(plan).runtime if plan.stack.images or plan.stack.unpublished else "host"


def find_python(plan: Plan) -> str:
    """Return the Python interpreter that starts the agent, in the container or on the node."""
    settings = container_settings(plan)
    nodes = host_python(settings) if find_runtime(plan) == "host" else None
    return nodes or settings.python


def host_python(settings: ContainerSettings) -> str | None:
    return settings.host_python or (settings.python if settings.runtime == "host" else None)


def find_remarks(plan: Plan) -> tuple[str, ...]:
    wanted, stack = container_settings(plan).runtime, plan.stack.stack
    if wanted != find_runtime(plan):
        return (f"stack {stack} has no images: the trials run with the Python of the nodes, without {wanted}",)
    return image_remarks(plan)


def find_container_problems(plan: Plan, run_dir: RunDir) -> Iterator[Problem]:
    runtime = find_runtime(plan)
    where = f"profile {plan.profile.profile}: container"
    if runtime == "host":
        has_images = plan.stack.images or plan.stack.unpublished
        if has_images and plan.hardware.image_platform not in plan.stack.locks:
            yield Problem(f"stack {plan.stack.stack}", "runs in images, but container.runtime: host does not use any",
                          expected="another container.runtime, or a stack with a lock or without images")  # fmt: skip
        return
    if shown_image(plan) is None:
        yield Problem(f"stack {plan.stack.stack}", f"has no image for {plan.hardware.hardware}",
                      expected="an image, or container.runtime: host")  # fmt: skip
    if is_imported(runtime) and container_settings(plan).image_dir is None:
        yield Problem(f"{where}.image_dir", "missing", expected=f"a shared folder for the images of {runtime}")
    if runtime in ENGINES and plan.num_gpus and not slurm_settings(plan).exclusive:
        yield Problem(f"profile {plan.profile.profile}: slurm.exclusive",
                      f"false, but {runtime} gives a job all GPUs of a node", expected="true")  # fmt: skip
    yield from _find_path_problems(plan, run_dir)


def list_binds(plan: Plan, run_dir: RunDir) -> list[Bind]:
    settings = container_settings(plan)
    binds = [_bind(str(run_dir.root.absolute()))]
    binds += [Bind(source=item.source, target=item.target or item.source, is_read_only=item.read_only)
              for item in settings.mounts]  # fmt: skip
    if plan.run.workload.needs_prepared:
        binds.append(_bind(str(PreparedDir.of(plan.profile, run_dir).root), is_read_only=True))
    if settings.package_dir is not None:
        binds.append(_bind(settings.package_dir, is_read_only=True))
    if find_runtime(plan) == "pyxis":
        binds += [_bind(device) for device in _AMD_DEVICES if plan.hardware.platform == "rocm"]
    return binds


def list_fabric(plan: Plan) -> tuple[str, ...]:
    """List device files of the network between nodes; the job's script mounts those that exist on the node."""
    if plan.layout.num_nodes == 1:
        return ()
    imex = () if slurm_settings(plan).block_size is None else (_IMEX,)
    return (*container_settings(plan).fabric, *imex)


def list_pyxis_mounts(plan: Plan, run_dir: RunDir) -> str:
    binds = list_binds(plan, run_dir)
    return ",".join(f"{bind.source}:{bind.target}{':ro' * bind.is_read_only}" for bind in binds)


def _bind(path: str, *, is_read_only: bool = False) -> Bind:
    return Bind(source=path, target=path, is_read_only=is_read_only)


def list_runtime_options(plan: Plan, run_dir: RunDir) -> list[str]:
    """List the runtime's options, which precede the image; for pyxis, these are options of ``srun``."""
    make = _OPTIONS.get(find_runtime(plan))
    return [] if make is None else [*make(plan, run_dir), *container_settings(plan).extra]


def _find_image(plan: Plan) -> Image | None:
    return None if find_runtime(plan) == "host" else shown_image(plan)


def make_import(plan: Plan) -> Import | None:
    """Return how the image is imported to a shared file; None for runtimes that keep images in their own store."""
    image, folder = _find_image(plan), container_settings(plan).image_dir
    if image is None or folder is None:
        return None
    return plan_import(find_runtime(plan), image, plan.hardware.machine, folder)


def make_image_name(plan: Plan) -> str:
    image = _find_image(plan)
    return "" if image is None else image.pinned


def list_entry(plan: Plan) -> list[str]:
    """List the words that precede Python in the agent's start command: ``env`` and the variables to set or unset."""
    words = ["env"]
    if plan.hardware.platform == "rocm" and slurm_settings(plan).exclusive:
        words += [f"--unset={name}" for name in AMD_VISIBILITY]
    image = _find_image(plan)
    if image is not None:
        words.append(f"{DIGEST_VARIABLE}={image.digest}")
    folder = container_settings(plan).package_dir
    return words if folder is None else [*words, "sh", "-c", _PREPEND, folder]


def _find_path_problems(plan: Plan, run_dir: RunDir) -> Iterator[Problem]:
    runtime = find_runtime(plan)
    rule = _UNSAYABLE.get(runtime)
    if rule is None:
        return
    pattern, what = rule
    paths = {path for bind in list_binds(plan, run_dir) for path in (bind.source, bind.target)} | {*list_fabric(plan)}
    for path in sorted(paths):
        if pattern.search(path):
            yield Problem("mount", f"{runtime} cannot take this path", got=path, expected=f"a path without {what}")


_UNSAYABLE: Final = {
    "pyxis": (re.compile(r"[\s,:]"), "spaces, commas or colons"),
    "podman": (re.compile(":"), "colons"),
}


_AMD_DEVICE_OPTIONS: Final = tuple(f"--device={device}" for device in _AMD_DEVICES)
_SHOW_GPUS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("apptainer", "cuda"): ("--nv",),
    ("apptainer", "rocm"): ("--rocm",),
    ("apptainer", "cpu"): (),
    ("podman", "cuda"): ("--device=nvidia.com/gpu=all",),
    ("podman", "rocm"): (*_AMD_DEVICE_OPTIONS, "--group-add=keep-groups", "--security-opt=seccomp=unconfined"),
    ("podman", "cpu"): (),
    ("docker", "cuda"): ("--gpus=all",),
    ("docker", "rocm"): (*_AMD_DEVICE_OPTIONS, "--security-opt=seccomp=unconfined"),
    ("docker", "cpu"): (),
}


def _pyxis_options(plan: Plan, run_dir: RunDir) -> Iterator[str]:
    yield f"--container-workdir={run_dir.root.absolute()}"
    yield from ("--no-container-mount-home", "--container-remap-root", "--container-writable")
    yield "--no-container-entrypoint"
    secrets = list_secrets(plan)
    if secrets:
        yield f"--container-env={','.join(secrets)}"


def _apptainer_options(plan: Plan, run_dir: RunDir) -> Iterator[str]:
    yield from ("--cleanenv", "--no-home", "--writable-tmpfs")
    yield f"--env={','.join(f'{name}={CACHE}' for name in _CACHES)}"
    yield from _SHOW_GPUS["apptainer", plan.hardware.platform]
    yield f"--pwd={run_dir.root.absolute()}"
    for bind in list_binds(plan, run_dir):
        yield f"--mount={_mount_fields(bind, 'destination', 'ro')}"


def _podman_options(plan: Plan, run_dir: RunDir) -> Iterator[str]:
    yield from _engine_options(plan, run_dir)
    yield "--user=0:0"  # Root here is the submitting user; an image's own user could not write to the run directory.
    yield "--pids-limit=-1"  # Podman allows 2048 threads by default; Ray on a node with 100 cores starts more.
    yield "--security-opt=label=disable"
    for bind in list_binds(plan, run_dir):
        yield f"--volume={bind.source}:{bind.target}{':ro' * bind.is_read_only}"
    yield from _SHOW_GPUS["podman", plan.hardware.platform]


def _docker_options(plan: Plan, run_dir: RunDir) -> Iterator[str]:
    yield from _engine_options(plan, run_dir)
    # the image has no home folder and no name for the submitting user
    yield from ("--env=HOME=/tmp", "--env=USER=rlk-repro")
    for bind in list_binds(plan, run_dir):
        yield f"--mount={_mount_fields(bind, 'target', 'readonly')}"
    yield from _SHOW_GPUS["docker", plan.hardware.platform]


def _engine_options(plan: Plan, run_dir: RunDir) -> Iterator[str]:
    # Ray and NCCL need the node's network and shared memory
    yield from ("--rm", "--network=host", "--ipc=host", "--entrypoint=")
    yield from ("--cap-drop=ALL", "--security-opt=no-new-privileges")
    yield f"--workdir={run_dir.root.absolute()}"
    yield from (f"--env={name}" for name in list_secrets(plan))


_OPTIONS: Final[Mapping[str, Callable[[Plan, RunDir], Iterator[str]]]] = {
    "pyxis": _pyxis_options,
    "apptainer": _apptainer_options,
    "podman": _podman_options,
    "docker": _docker_options,
}


def _mount_fields(bind: Bind, target: str, read_only: str) -> str:
    """Return one mount as a line of quoted comma-separated values, which is the form that the runtimes parse."""
    fields = ["type=bind", f"source={bind.source}", f"{target}={bind.target}"]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([*fields, read_only] if bind.is_read_only else fields)
    return text.getvalue()
