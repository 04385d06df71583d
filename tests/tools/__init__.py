"""What only the Makefile and tests use."""
