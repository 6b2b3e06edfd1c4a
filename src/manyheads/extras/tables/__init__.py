"""Tables of text: CSV, TSV and Parquet."""
