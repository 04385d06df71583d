"""Choose a stack and a platform for its image or environment; read the lock of its packages.

For an image that a stack plans and that no registry has yet, dry runs show a placeholder.
"""

from __future__ import annotations

import platform as machine
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.resources import PACKAGE, list_names, stack_folders
from rlk_repro.plan import Plan
from rlk_repro.probes import gpu_amd
from rlk_repro.spec import Image, ImagePlatform, Stack
from rlk_repro.spec.load import load_stack

AMD_DRIVER: Final = Path(gpu_amd.KFD)
FOLDER: Final = PACKAGE.parent / "requirements"
COST: Final = "5 GB to download"
DISK_BYTES: Final = 12 * 10**9
"""The size of an environment, as measured (docs/images.md); the build of an image takes twice as much."""
_PACKAGE: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
NOT_PUBLISHED: Final = Image.model_construct(
    reference="registry.example/rlk-repro", digest="<not published: run rlk-repro images build>"
)


def get_stack(name: str | None) -> Stack:
    """Return a stack by name or file; for None, the newest whose image can be built for this machine."""
    if name is not None:
        return load_stack(name).model
    # a stack with a suffix, such as another commit of RL-Kernel, comes after the stack of the same month
    names = sorted(list_names(stack_folders()), key=lambda found: (found[:7], -len(found)), reverse=True)
    stacks = (get_stack(found) for found in names)
    return next(stack for stack in stacks if find_platform() in stack.bases)


def find_platform() -> ImagePlatform:
    """Return this machine's platform; it depends on the processor and on whether AMD's GPU driver is loaded."""
    if machine.machine() == "aarch64":
        return "cuda-arm64"
    return "rocm-amd64" if AMD_DRIVER.exists() else "cuda-amd64"


def choose_platform(stack: Stack, names: Sequence[ImagePlatform], platform: str | None, what: str) -> ImagePlatform:
    """Return the named platform, or else the only platform, or else this machine's platform."""
    chosen = names[0] if platform is None and len(names) == 1 else platform or find_platform()
    for name in names:
        if name == chosen:
            return name
    expected = " or ".join(f"--platform {name}" for name in names) or f"a stack with {what}s"
    raise SpecError(Problem(f"stack {stack.stack}", f"has no {what} for this platform", got=chosen, expected=expected))


def lock_path(stack: str, platform: str) -> Path:
    return FOLDER / f"{stack}-{platform}.txt"


def read_lock(stack: Stack, platform: ImagePlatform) -> dict[str, str]:
    """Return the version of each package; raise SpecError if the lock's hash is not the one that the stack names."""
    path = lock_path(stack.stack, platform)
    if not path.is_file():
        hint = "environments and images are built from a checkout of rlk-repro"
        raise EnvironmentMissing(Problem(str(path), "is not there", hint=hint))
    data = path.read_bytes()
    found, expected = f"sha256:{sha256_bytes(data)}", stack.locks.get(platform)
    if found != expected:
        raise SpecError(
            Problem(f"requirements/{path.name}", f"is not the lock that stack {stack.stack} names", got=found,
                    expected=expected, hint="git diff shows what was changed")
        )  # fmt: skip
    return dict(_PACKAGE.findall(data.decode()))


def shown_image(plan: Plan) -> Image | None:
    """Return the plan's image, or the placeholder for an image that is not published."""
    is_meant = plan.hardware.image_platform in plan.stack.unpublished
    return plan.image or (NOT_PUBLISHED if is_meant else None)


def image_remarks(plan: Plan) -> tuple[str, ...]:
    if shown_image(plan) is not NOT_PUBLISHED:
        return ()
    missing = f"stack {plan.stack.stack} has no published image for {plan.hardware.hardware}"
    return (f"cannot be submitted yet: {missing}",)
