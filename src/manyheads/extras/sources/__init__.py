"""Data by name: `manyheads prepare --from SOURCE` fetches files and prepares them."""
