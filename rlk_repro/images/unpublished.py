"""Give dry runs a placeholder for an image that a stack plans and that no registry has yet."""

from __future__ import annotations

from typing import Final

from rlk_repro.plan import Plan
from rlk_repro.spec import Image

NOT_PUBLISHED: Final = Image.model_construct(
    reference="registry.example/rlk-repro", digest="<not published: run rlk-repro images build>"
)


def shown_image(plan: Plan) -> Image | None:
    """Return the plan's image, or the placeholder for an image that is not published."""
    is_meant = plan.hardware.image_platform in plan.stack.unpublished
    return plan.image or (NOT_PUBLISHED if is_meant else None)


def image_remarks(plan: Plan) -> tuple[str, ...]:
    if shown_image(plan) is not NOT_PUBLISHED:
        return ()
    where = f"stack {plan.stack.stack} has no published image for {plan.hardware.hardware}"
    return (f"{where}: submit refuses this job",)
