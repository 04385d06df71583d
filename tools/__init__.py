"""Tools that the Makefile runs; they are not part of the installed package."""
