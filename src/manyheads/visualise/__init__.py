"""Pictures from tensors and records alone, as PNG and SVG. Needs matplotlib: `pip install manyheads[plot]`."""
