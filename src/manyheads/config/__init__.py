"""Conversion of files and command lines to dataclasses. Every package declares its own; this one does not depend on
them.
"""
