"""Install RL-Kernel at a stack's commit into this Python's environment, and check the result."""
