"""What the Makefile runs; no part of the installed package."""
