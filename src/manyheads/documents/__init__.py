"""Translation of documents: what is text in a file, its sentences, and the file again with their translations."""
