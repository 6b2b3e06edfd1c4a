"""Corpora, token stores, order of samples, batches: everything between text and a model's input."""
