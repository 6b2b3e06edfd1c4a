"""Evaluation of models: BLEU, chrF, perplexity, bracket F1."""
