"""The fixtures of the tests of extras: those that run the program."""

from hash_model import hash_model
from program_fixtures import compiled_folder, manyheads, model_folder, one_thread, pairs, printed, refused, stdin, told

__all__ = [
    "compiled_folder",
    "hash_model",
    "manyheads",
    "model_folder",
    "one_thread",
    "pairs",
    "printed",
    "refused",
    "stdin",
    "told",
]
