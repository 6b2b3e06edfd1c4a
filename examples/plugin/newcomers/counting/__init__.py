"""A task of its own for language models, of the plug-in `newcomers`: texts, judged by how often a byte is right."""
