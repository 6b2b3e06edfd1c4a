"""Whole texts: reading, preparing, and segments of them."""
