"""Plots of tensors and records (needs matplotlib: `pip install manyheads[plot]`), and pages of HTML (need nothing)."""
