"""A model that can be searched and understood."""

from hash_model import hash_model

__all__ = ["hash_model"]
