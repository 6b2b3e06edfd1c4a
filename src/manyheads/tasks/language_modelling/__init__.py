"""Language modelling: a text, likelihood of each next token."""
