"""``rlk-repro prepare``: puts a run's model, data set and stored rollouts on disk once, whole and by content.

Where each of them lies is ``rlk_repro.prepare.layout``'s; here it is fetched, made or converted, and recorded.
Trainers never download.
"""
