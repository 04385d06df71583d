"""A double of RL-Kernel for tests that have no checkout of it: registry and native operators of one CPU.

Written from the documented behaviour of RL-Kernel at the commit of the stack ``rl-kernel-host``; none of its source is
here.
"""
