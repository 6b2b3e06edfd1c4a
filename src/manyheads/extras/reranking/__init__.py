"""Hypotheses that a model of the reverse direction ranks again."""
