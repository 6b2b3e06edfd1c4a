"""The decoder-only language model: the Transformer's decoder without a source, as GPT-2 (Radford et al. 2019)."""
