"""Greedy search, beam search and sampling over token ids, and translation and generation of text."""
