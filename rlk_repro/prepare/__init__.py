"""Put a run's model, data set and stored rollouts on disk once, complete and checked (``rlk-repro prepare``).

Trainers never download.
"""
