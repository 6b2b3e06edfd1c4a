"""One file per command, which reads its arguments, calls the library and prints."""
