"""Shortlists are learned: likely translations of words, for a faster search."""
