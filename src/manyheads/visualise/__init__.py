"""Plots of tensors and records, as PNG and SVG. Needs matplotlib: `pip install manyheads[plot]`."""
