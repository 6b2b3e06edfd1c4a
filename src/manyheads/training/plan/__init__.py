"""The cost of a run, predicted before it begins: memory, the largest step, one trial step."""
