"""Sentence pairs: reading, cleaning, preparing, and batches of them."""
