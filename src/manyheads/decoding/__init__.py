"""Greedy search, beam search and sampling over ids; translation, parsing, classification and generation of text."""
