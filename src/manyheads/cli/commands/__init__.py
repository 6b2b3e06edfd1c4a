"""One file a command: it reads its arguments, calls the library, prints."""
