"""Measure whether RL-Kernel makes GRPO training with vime faster or saves memory."""

__version__ = "0.2.0"
