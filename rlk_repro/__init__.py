"""rlk-repro: does RL-Kernel make vime's GRPO training faster or smaller, and can it be proved?"""

__version__ = "0.2.0"
