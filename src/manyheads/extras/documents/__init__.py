"""Translation of documents: finding the text in a file, splitting it into sentences, and writing the file with their
translations."""
