"""An encoder-decoder without attention, for `test_additions.py`."""
