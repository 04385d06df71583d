"""The objects that Kubernetes gets, as dicts, from a plan and the run directory.  Pure; asks and writes nothing.

Sending them is ``rlk_repro.backends.kubernetes``'s; what runs in the pods is ``rlk_repro.pod``'s and the node agent's.
"""

from rlk_repro.k8s.naming import OBJECTS, make_name
from rlk_repro.k8s.objects import dump_objects, make_collector, render_objects, time_limit_min
from rlk_repro.k8s.rules import find_object_problems

__all__ = [
    "OBJECTS",
    "dump_objects",
    "find_object_problems",
    "make_collector",
    "make_name",
    "render_objects",
    "time_limit_min",
]
