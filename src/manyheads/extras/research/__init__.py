"""Extra: research."""
