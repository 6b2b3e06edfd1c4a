"""A language model without attention and without memory_len, for `test_additions.py`."""
