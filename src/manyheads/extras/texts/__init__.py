"""The names of the texts that teach these models, one module a text: its own code runs with one import changed."""
