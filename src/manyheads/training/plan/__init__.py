"""The cost of a run before it begins: memory, the largest step, one real step."""
