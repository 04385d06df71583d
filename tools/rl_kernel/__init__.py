"""Installs RL-Kernel at a stack's commit into the environment of this Python and proves what it got."""
