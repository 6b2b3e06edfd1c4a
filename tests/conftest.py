"""Shared by all tests: runtime checks of tensor shapes, the folder of large fixtures, one thread a process."""

import gc
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from long_files import longest_first
from thinning import thin

# No test measures time: it would fail on a slow or busy machine.
settings.register_profile("manyheads", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("manyheads")

TYPECHECKED = ["manyheads.nn", "manyheads.models"]
"""Packages whose signatures state tensor shapes; calls are checked in the tests, never in use."""

pytest_plugins = ["figures", "warm"]

HOOKED = os.environ.get("MANYHEADS_TYPECHECK", "1") != "0"

# What `--precision auto` means must not depend on the machine that runs the tests, here and in child processes.
os.environ.setdefault("MANYHEADS_PRECISION", "fp32")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in child processes

if HOOKED:
    from shape_checks import forget, install

    install(TYPECHECKED)


gc.disable()  # while tests are collected almost nothing becomes garbage


def pytest_collection_finish() -> None:
    """Modules and tests are a million objects that stay: the garbage collector passes over them from here on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def shapes_checked_anew() -> None:
    """Every file of tests has its calls checked, whatever ran before in this process."""
    if HOOKED:
        forget()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `unhooked` cannot run under the checks (torch.compile and export cannot trace them).

    Those marked `compiles` need a C++ compiler, which users need not have.
    """
    longest_first(items)
    thin(items)
    if not any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++"])):
        for item in items:
            if item.get_closest_marker("compiles"):
                item.add_marker(pytest.mark.skip(reason="torch needs a C++ compiler to compile; there is none here"))
    if not HOOKED:
        return
    unhooked = [item for item in items if item.get_closest_marker("unhooked")]
    if unhooked:
        config.hook.pytest_deselected(items=unhooked)
        items[:] = [item for item in items if not item.get_closest_marker("unhooked")]


@pytest.fixture(autouse=True, scope="session")
def quick_seeds() -> Iterator[None]:
    """Where there is no accelerator, seeding seeds the CPU alone.

    torch would put the seeding of other devices off until they are used, and keep a stack trace for each time, which
    takes a millisecond.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.accelerator.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch, torch.random):
            patch.setattr(module, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_runs() -> Iterator[None]:
    """A training run freezes what was there before it; here that is done already, and to undo it is not wanted."""
    device = sys.modules.get("manyheads.training.run.device")
    if device is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "gc", SimpleNamespace(**dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: 0)))
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_disks() -> Iterator[None]:
    """Files and folders are not synced, which takes milliseconds each and shows nothing while the power is on.

    Tests of the order of operations put their own function in this place, or watch a process from outside.
    """
    real = os.fsync

    def fsync(handle: int) -> None:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True)
def quick_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, commands in a test's process count as quick: they show no progress."""
    monkeypatch.setattr("manyheads.cli.watching.phases.DELAY_SECONDS", float("inf"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large fixtures and corpora; MANYHEADS_SHARED names another place."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("MANYHEADS_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; MANYHEADS_SHARED may name another")
    return folder
