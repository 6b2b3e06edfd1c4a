"""Constituency parsing: sentences to trees (Vaswani et al. 2017, sec. 6.3)."""
