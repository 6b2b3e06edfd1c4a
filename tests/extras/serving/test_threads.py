"""Threads of the server: only the engine's may keep workers for parallel operations."""

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.extras.serving import service
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings


def test_the_thread_that_loads_models_ends(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its OpenMP workers stay, and every operation of the engine's thread waits for workers that sleep."""
    loading: list[threading.Thread] = []
    load_models = service.load_models

    def noted(*given: Any) -> Any:
        loading.append(threading.current_thread())
        return load_models(*given)

    monkeypatch.setattr(service, "load_models", noted)
    with TestClient(build_app(settings)) as client:
        assert client.get("/readyz").status_code == 200
        assert loading
        loading[0].join(10.0)
        assert not loading[0].is_alive()
