"""The fixtures of the tests of extras: those that run the program."""

from program_fixtures import compiled_folder, manyheads, model_folder, one_thread, pairs, printed, refused, stdin, told

__all__ = ["compiled_folder", "manyheads", "model_folder", "one_thread", "pairs", "printed", "refused", "stdin", "told"]
