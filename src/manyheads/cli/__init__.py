"""The command line.

Each subcommand has one file, which reads options, calls the library and prints. This package computes nothing itself.
"""
