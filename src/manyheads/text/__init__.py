"""Conversion between text and token ids, without tensors."""
