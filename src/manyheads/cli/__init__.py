"""The command line: one file a subcommand, which parses, calls and prints. Nothing here computes."""
