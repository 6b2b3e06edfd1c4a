"""Chart parsing: constituent trees from scores of spans."""
