"""A FakeModel, and a client of an application that serves it."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.fakes import FakeModel
from tests.unit.serve_app.front.front import serving


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(model: FakeModel) -> Iterator[TestClient]:
    with serving(model) as client:
        yield client
