"""A regular package: beside Megatron-LM, whose ``tools`` is one, a mere folder would not be found."""
