"""Conversion of files and command lines to dataclasses, which every package declares for itself."""
