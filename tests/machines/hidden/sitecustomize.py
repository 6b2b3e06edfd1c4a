"""Hides or changes parts of this system, as on a machine without them; every Python process imports it at its start.

It works in child processes too, because it is found through PYTHONPATH. MANYHEADS_TEST_HIDE lists what is hidden,
separated by spaces: `/proc` (a folder), `os.sched_getaffinity` (an attribute), `fcntl` (a module). Three names are
not hidden but changed: `setlocale` (the locale of the variables holds from the start, in C code too), `clock` (the time
of day jumps), `renameat2` (the C library does not have it).
"""

import builtins
import ctypes
import errno
import importlib
import itertools
import locale
import os
import sys
import time

OURS = "manyheads"
EVENTS = ("open", "os.listdir", "os.scandir", "os.chdir")


def hide_folder(folder):
    """Every access from Python finds nothing; torch's and the C library's own code still sees the folder."""

    def is_hidden(path):
        try:
            path = os.fsdecode(path)
        except TypeError:  # an open file's number
            return False
        return path == folder or path.startswith(folder + "/")

    def refuse(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def watch(event, arguments):
        if event in EVENTS and arguments and is_hidden(arguments[0]):
            refuse(arguments[0])

    def guarded(function):
        def call(path, *arguments, **options):
            if is_hidden(path):
                refuse(path)
            return function(path, *arguments, **options)

        return call

    sys.addaudithook(watch)
    for name in ("stat", "lstat", "readlink", "access"):  # these raise no audit event
        setattr(os, name, guarded(getattr(os, name)))


def hide_modules(names):
    """From our own code only: other packages ask which system this is, and rightly import what it always has."""
    real = builtins.__import__

    def import_module(name, globals=None, locals=None, fromlist=(), level=0):
        if name in names and level == 0 and str((globals or {}).get("__name__")).partition(".")[0] == OURS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = import_module


def set_locale():
    """Programs with a window call this; then numbers are printed and read with commas by C code."""
    if os.environ.get("MANYHEADS_TEST_COMMA"):  # no such locale can be had here
        real = locale.localeconv
        locale.localeconv = lambda: {**real(), "decimal_point": ",", "thousands_sep": "."}
    else:
        locale.setlocale(locale.LC_ALL, "")


def make_clock_jump():
    """Each call is an hour back or a day ahead of the one before."""
    jumps = itertools.cycle([0, -3600, 86400])
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + next(jumps)
    time.time_ns = lambda: nanoseconds() + next(jumps) * 10**9


def hide_renameat2():
    real = ctypes.CDLL.__getattr__

    def look(library, name):
        if name == "renameat2":
            raise AttributeError(name)
        return real(library, name)

    ctypes.CDLL.__getattr__ = look


CHANGES = {"setlocale": set_locale, "clock": make_clock_jump, "renameat2": hide_renameat2}


def hide(names):
    modules = set()
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if name in CHANGES:
            CHANGES[name]()
        elif name.startswith("/"):
            hide_folder(name)
        elif owner:
            found = importlib.import_module(owner)
            if hasattr(found, attribute):
                delattr(found, attribute)
        else:
            modules.add(name)
    if modules:
        hide_modules(modules)


hide(os.environ.get("MANYHEADS_TEST_HIDE", "").split())
