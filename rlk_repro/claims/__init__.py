"""What others published about RL-Kernel's speed and memory, and whether this machine can reproduce it.

``files`` are the claims as shipped, ``check`` re-runs those that this hardware can run, ``judge`` finds the word,
``results`` is the record of it all and ``text`` its form for people.  None of these numbers is a result of ours.
"""
