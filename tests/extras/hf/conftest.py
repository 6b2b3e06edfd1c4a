"""Every test here has the classes of transformers registered."""

from hf_models import folder_of, registered

__all__ = ["folder_of", "registered"]
