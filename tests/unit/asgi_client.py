"""A client of an application in this process, as one on the same machine would be."""

from typing import Any

from starlette.testclient import TestClient

BASE_URL = "http://127.0.0.1:8000"
JSON = {"content-type": "application/json"}


def client_of(app: Any) -> TestClient:
    """Bodies of bytes are declared to be JSON, too."""
    return TestClient(app, base_url=BASE_URL, headers=JSON)
