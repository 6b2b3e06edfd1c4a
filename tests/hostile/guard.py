"""An audit hook that notes and forbids what a file must never bring a reader to do. It cannot be taken off again."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Guard", "SideEffectError"]

FORBIDDEN = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill"),
    *("subprocess.Popen", "pty.spawn", "signal.pthread_kill", "webbrowser.open", "code.__new__"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.__new__"),
    *("urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect", "telnetlib.Telnet.open"),
    *("ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "ctypes.cdata", "ctypes.string_at"),
    *("pickle.find_class", "os.putenv", "os.setxattr", "sys.setprofile", "sys.settrace"),
)
"""Events; `pickle.find_class` is raised by Python's own unpickler, whatever module calls it."""
OUR_OWN = {
    "ctypes.dlopen": (None, "libnvidia-ml.so.1"),
    "ctypes.dlsym": ("gnu_get_libc_version", "mallopt", "nvmlInit", "nvmlDeviceGetCount_v2"),
}
"""What `train` does to set up the machine: the C library that is there already, and two of its functions. And how
torch's build for CUDA counts GPUs: NVIDIA's library, and two functions of it."""
MODULES = frozenset(
    (
        "antigravity",
        "code",
        "ctypes",
        "ftplib",
        "http.server",
        "nntplib",
        "pty",
        "smtplib",
        "telnetlib",
        "xmlrpc.client",
    )
)
"""Nobody who reads a model imports these."""
CHANGING = {
    **{"os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,)},
    **{"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,), "os.utime": (0,), "shutil.rmtree": (0,)},
    **{"shutil.move": (0, 1), "shutil.copyfile": (1,), "shutil.copytree": (1,), "shutil.unpack_archive": (1,)},
}
"""Events that change files, and which of their arguments say where."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class SideEffectError(BaseException):
    """Not an Exception, so that no handler in the code under test can keep it silent."""


class Guard:
    """While `armed`, every forbidden event is noted in `seen` and raises.

    Args:
        folder: the only place where files may be written.
        child: a substring of the command line of a process that may be started.
    """

    def __init__(self, folder: Path, child: str) -> None:
        self._folder = str(folder.resolve())
        self._child = child
        self._on = False
        self._inside = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or self._inside:
            return
        self._inside = True
        try:
            effect = self._effect(event, arguments)
        finally:
            self._inside = False
        if effect:
            self.seen.append(effect)
            raise SideEffectError(effect)

    def _effect(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event == "subprocess.Popen" and self._child in str(arguments[1]):
            return ""
        if event in OUR_OWN and arguments[-1] in OUR_OWN[event]:
            return ""
        if event in FORBIDDEN:
            return f"{event} {arguments!r}"[:300]
        if event == "import" and arguments[0] in MODULES:
            return f"import {arguments[0]}"
        if event == "open" and self._writes(*arguments) and not self._is_mine(arguments[0]):
            return f"open {arguments!r}"[:300]
        for place in CHANGING.get(event, ()):
            path, handle = arguments[place], arguments[-1]
            if isinstance(handle, int) and handle > 0 and Path(f"/proc/self/fd/{handle}").is_dir():
                path = Path(f"/proc/self/fd/{handle}").readlink() / os.fsdecode(path)  # relative to an open folder
            if not self._is_mine(path):
                return f"{event} {arguments!r}"[:300]
        return ""

    def _writes(self, path: Any, mode: Any, flags: Any) -> bool:
        if isinstance(path, int):
            return False
        if isinstance(mode, str):
            return bool(set(mode) & set("wax+"))
        return bool(isinstance(flags, int) and flags & WRITING)

    def _is_mine(self, path: Any) -> bool:
        if isinstance(path, int):
            return True  # a handle that was opened before, when its path was looked at
        text = os.path.realpath(os.fsdecode(path))
        return text == os.devnull or text == self._folder or text.startswith(self._folder + os.sep)
