"""Evaluation of models: BLEU, chrF, perplexity, bracket F1, accuracy, and how much each head matters."""
