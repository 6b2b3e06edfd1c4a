"""Extra: extras."""
