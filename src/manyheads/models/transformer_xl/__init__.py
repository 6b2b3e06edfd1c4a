"""The Transformer-XL (Dai et al. 2019): a language model with memory."""
