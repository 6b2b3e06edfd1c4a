"""Constituency parsing, by text or by a chart; see README.md."""
