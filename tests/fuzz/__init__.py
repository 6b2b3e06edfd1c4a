"""Random and hostile input: mutations, command lines, and the forked children in which they run."""
