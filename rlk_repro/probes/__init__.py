"""Probes find the facts of a node.  Each section of the manifest has one module; ``node`` calls all of them.

A probe reads files below ``root`` and runs tools on PATH.  A machine that lacks a file or a tool causes no error.
"""
