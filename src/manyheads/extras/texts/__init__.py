"""The source texts' own names, signatures and parameter names over this package's functions."""
