"""Files that attack whoever reads them, a guard that sees what they do, and a process that reads them under it."""
