"""Sentence pairs from translation memories in XML."""
