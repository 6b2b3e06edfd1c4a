"""Several processes as one run: start, communication, and detection of lost processes."""
