"""Probes: the facts of a node.  Each section has one module; ``node`` puts them together.

A probe reads files below ``root`` and runs tools on PATH; it raises no error for something that a machine lacks.
"""
