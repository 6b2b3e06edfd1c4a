"""The Reformer (Kitaev et al. 2020): a language model, an encoder-decoder, and a classifier with its encoder."""
