"""The segments of WMT's .sgm files."""
