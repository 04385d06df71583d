"""Check what others published about RL-Kernel's speed and memory: can this machine reproduce it?

``files`` loads the shipped claims, ``check`` re-runs those that this hardware can run, ``judge`` finds the word,
``results`` is the record, and ``text`` its form for people.  The published numbers are not results of rlk-repro.
"""
