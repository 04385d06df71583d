"""Make the options by which a container runtime starts the stack's image; refuse values that a runtime cannot take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.slurm.options import slurm_settings
from rlk_repro.images.importing import Import, is_imported, plan_import
from rlk_repro.images.stacks import image_remarks, shown_image
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


class Bind(NamedTuple):
    source: str
    target: str
    is_read_only: bool = False


def container_settings(plan: Plan) -> ContainerSettings:
    return plan.profile.container or ContainerSettings()


def find_runtime(plan: Plan) -> str:
    """Return the profile's runtime, or ``host`` if the stack has no images and so uses the nodes' own software."""
    if plan.stack.images or plan.stack.unpublished:
        return container_settings(plan).runtime
    return "host"


def find_python(plan: Plan) -> str:
    """Return the Python interpreter that starts the agent, in the container or on the node."""
    settings = container_settings(plan)
    if find_runtime(plan) == "host" and settings.host_python is not None:
        return settings.host_python
    return settings.python


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
    folder = str(run_dir.root.absolute())
    binds = [Bind(folder, folder)]
    for item in settings.mounts:
        binds.append(Bind(item.source, item.target or item.source, item.read_only))
    if plan.run.workload.needs_prepared:
        prepared = str(PreparedDir.of(plan.profile, run_dir).root)
        binds.append(Bind(prepared, prepared, is_read_only=True))
    if settings.package_dir is not None:
        binds.append(Bind(settings.package_dir, settings.package_dir, is_read_only=True))
    if find_runtime(plan) == "pyxis" and plan.hardware.platform == "rocm":
        binds += [Bind(device, device) for device in _AMD_DEVICES]
    return binds


def list_fabric(plan: Plan) -> tuple[str, ...]:
    """List device files of the network between nodes; the job's script mounts those that exist on the node."""
    if plan.layout.num_nodes == 1:
        return ()
    imex = () if slurm_settings(plan).block_size is None else (_IMEX,)
    return (*container_settings(plan).fabric, *imex)


def list_runtime_options(plan: Plan, run_dir: RunDir) -> list[str]:
    """List the runtime's options, which precede the image; for pyxis, these are options of ``srun``."""
    runtime, secrets = find_runtime(plan), list_secrets(plan)
    if runtime not in _OPTIONS:
        return []
    mount, read_only = _MOUNTS.get(runtime, ("", ""))
    mounts = [
        mount.format(bind.source, bind.target) + (read_only if bind.is_read_only else "")
        for bind in list_binds(plan, run_dir)
    ]
    several = {
        "{gpus}": _SHOW_GPUS.get((runtime, plan.hardware.platform), ()),
        "{mounts}": mounts,
        "{secrets}": [f"--env={name}" for name in secrets],
        "{pyxis secrets}": [f"--container-env={','.join(secrets)}"] if secrets else [],
    }
    options: list[str] = []
    for word in _OPTIONS[runtime]:
        options += several.get(word, [word.replace("{folder}", str(run_dir.root.absolute()))])
    return [*options, *container_settings(plan).extra]


def find_image(plan: Plan) -> Image | None:
    return None if find_runtime(plan) == "host" else shown_image(plan)


def make_import(plan: Plan) -> Import | None:
    """Return how the image is imported to a shared file; None for runtimes that keep images in their own store."""
    image, folder = find_image(plan), container_settings(plan).image_dir
    if image is None or folder is None:
        return None
    return plan_import(find_runtime(plan), image, plan.hardware.machine, folder)


def list_entry(plan: Plan) -> list[str]:
    """List the words that precede Python in the agent's start command: ``env`` and the variables to set or unset."""
    words = ["env"]
    if plan.hardware.platform == "rocm" and slurm_settings(plan).exclusive:
        words += [f"--unset={name}" for name in AMD_VISIBILITY]
    image = find_image(plan)
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


# what the options of a runtime cannot hold: pyxis and podman separate fields by colons, the others by commas
_UNSAYABLE: Final = {
    "pyxis": (re.compile(r"[\s,:]"), "spaces, commas or colons"),
    "podman": (re.compile(":"), "colons"),
    "apptainer": (re.compile(r'[,"]'), "commas or quotes"),
    "docker": (re.compile(r'[,"]'), "commas or quotes"),
}
_AMD_DEVICE_OPTIONS: Final = tuple(f"--device={device}" for device in _AMD_DEVICES)
_SHOW_GPUS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("apptainer", "cuda"): ("--nv",),
    ("apptainer", "rocm"): ("--rocm",),
    ("podman", "cuda"): ("--device=nvidia.com/gpu=all",),
    ("podman", "rocm"): (*_AMD_DEVICE_OPTIONS, "--group-add=keep-groups", "--security-opt=seccomp=unconfined"),
    ("docker", "cuda"): ("--gpus=all",),
    ("docker", "rocm"): (*_AMD_DEVICE_OPTIONS, "--security-opt=seccomp=unconfined"),
}
# a mount of a source and a target, and what makes it read-only
_MOUNTS: Final = {
    "apptainer": ("--mount=type=bind,source={},destination={}", ",ro"),
    "podman": ("--volume={}:{}", ":ro"),
    "docker": ("--mount=type=bind,source={},target={}", ",readonly"),
}
_ENGINE: Final = (
    # Ray and NCCL need the node's network and shared memory
    *("--rm", "--network=host", "--ipc=host", "--entrypoint=", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    *("--workdir={folder}", "{secrets}"),
)
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "pyxis": (
        *("--container-workdir={folder}", "--no-container-mount-home", "--container-remap-root"),
        *("--container-writable", "--no-container-entrypoint", "{pyxis secrets}"),
    ),
    "apptainer": (
        *("--cleanenv", "--no-home", "--writable-tmpfs", f"--env={','.join(f'{name}={CACHE}' for name in _CACHES)}"),
        *("{gpus}", "--pwd={folder}", "{mounts}"),
    ),
    "podman": (
        *_ENGINE,
        "--user=0:0",  # Root here is the submitting user; an image's own user could not write to the run directory.
        "--pids-limit=-1",  # Podman allows 2048 threads by default; Ray on a node with 100 cores starts more.
        *("--security-opt=label=disable", "{mounts}", "{gpus}"),
    ),
    # the image has no home folder and no name for the submitting user
    "docker": (*_ENGINE, "--env=HOME=/tmp", "--env=USER=rlk-repro", "{mounts}", "{gpus}"),
}
