"""Put a run's model, data set and stored rollouts on disk once, complete and checked (``rlk-repro prepare``).

``rlk_repro.prepare.layout`` names the folders.  Other modules here fetch, make or convert the files and record them.
Trainers never download.
"""
