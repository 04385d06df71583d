"""Probes collect the facts of a node.  Each section of the manifest has one module; ``node`` calls all probes.

A probe reads files below ``root`` and runs tools on PATH.  If a file or a tool is missing, the fact is Unknown.
"""
