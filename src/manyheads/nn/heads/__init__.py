"""Heads: from hidden states to log-probabilities or a loss."""
