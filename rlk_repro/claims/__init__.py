"""Check whether this machine reproduces what others published about RL-Kernel's speed and memory."""
