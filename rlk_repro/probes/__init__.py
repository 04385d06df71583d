"""Probes collect the facts of a node.  Each section of the manifest has one module; ``node`` calls all probes.

A probe reads files below ``root`` and runs tools on PATH.  A missing file or tool causes no error.
"""
