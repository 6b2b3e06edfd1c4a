"""Parsing of arguments, and help pages."""
