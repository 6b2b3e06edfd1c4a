"""A task of its own for language models, for `test_additions.py`: texts, judged by how often a byte is right."""
