"""Commands that read lines and write lines: input, output, several processes, checks."""
