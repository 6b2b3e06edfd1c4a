"""Corpora that ship inside the package, each with its attribution beside it."""
