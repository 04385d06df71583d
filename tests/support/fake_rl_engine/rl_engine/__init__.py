"""A double of RL-Kernel for tests that have no checkout of it: registry and native operators of one CPU.

Written from the documented behaviour of RL-Kernel at the commit of the stack ``rl-kernel-host``; none of its source is
here.  Where ``RLK_SRC`` names the real one, tests/integration/test_fake_rl_engine.py holds the two against each other.
"""
