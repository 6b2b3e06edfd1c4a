"""How good a model is: BLEU, chrF, perplexity."""
