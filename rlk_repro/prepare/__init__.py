"""``rlk-repro prepare``: put a run's model, data set and stored rollouts on disk once, complete and checked.

``rlk_repro.prepare.layout`` says where each of them is; this package fetches, makes or converts them and records what
it did.  Trainers never download.
"""
