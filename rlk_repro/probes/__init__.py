"""Each probe collects the facts of one section of a node's manifest.

A probe reads files below ``root`` and runs tools on PATH; a missing file or tool causes no error.
"""
