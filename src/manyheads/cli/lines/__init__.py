"""The common parts of commands that read and write lines: input, output, several processes, checks."""
