"""Reading arguments and printing help."""
