"""Greedy search, beam search and sampling over token ids; translation, parsing, classification and generation of text."""
