"""Put a run's model, data set and stored rollouts on disk once, complete and checked (``rlk-repro prepare``).

``rlk_repro.prepare.layout`` names the place of each.  This package fetches, makes or converts them and records what it
did.  Trainers never download.
"""
