"""The objects that Kubernetes gets, as dicts, from a plan and the run directory.  Pure; asks and writes nothing.

Sending them is ``rlk_repro.backends.kubernetes``'s; what runs in the pods is ``rlk_repro.pod``'s and the node agent's.
The commands that answer inside a pod start often, beside a trial: what they import from here must stay small.
"""
