"""Attention of every kind, masks, and the states of a search."""
