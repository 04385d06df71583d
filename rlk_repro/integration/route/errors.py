"""The error of a route that cannot go on: the numbers it would give are not the trainer's."""

from __future__ import annotations


class RouteFailed(RuntimeError):
    """An operator's answer, or the way a trainer treats it, is not what the route was written for.

    There is nothing to fall back to: it is raised in every mode.
    """
