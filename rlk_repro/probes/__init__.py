"""Probes: what a node is.  One module per section; ``node`` puts them together.

A probe reads files below ``root`` and asks tools on PATH; it never raises for what a machine lacks.
"""
