"""Plots of tensors and records (needs matplotlib: the extra `plot`), and pages of HTML (need nothing)."""
