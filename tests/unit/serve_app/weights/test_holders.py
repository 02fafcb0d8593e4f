"""What replicas ask of the holder of their node, where there is none, or another node's."""

import asyncio
from typing import Any

import pytest

from serve_app.weights import holders
from serve_app.weights.holders import HolderOfThisNode


class Method:
    def __init__(self, calls: list[tuple[Any, ...]], answer: Any) -> None:
        self._calls = calls
        self._answer = answer

    async def remote(self, *arguments: Any) -> Any:
        self._calls.append(arguments)
        return self._answer


class FakeHolder:
    """Of the deployment `weights`, on a node."""

    def __init__(self, node: str) -> None:
        self.released: list[tuple[Any, ...]] = []
        self.ping = Method([], node)
        self.acquire = Method([], "its grant")
        self.release = Method(self.released, True)
        self.release_all = Method(self.released, None)


@pytest.mark.parametrize("node", ["here", "there"])
def test_who_got_no_image_releases_it_where_its_own_node_has_a_holder(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FakeHolder(node)
    monkeypatch.setattr(holders, "_own_node", lambda: "here")
    monkeypatch.setattr(holders, "_find", lambda _: None)
    monkeypatch.setattr(HolderOfThisNode, "_deployment", found)
    key: Any = "key"
    assert asyncio.run(HolderOfThisNode().release(key, "me")) == (node == "here")
    asyncio.run(HolderOfThisNode().release_all("me"))
    assert found.released == ([("key", "me"), ("me",)] if node == "here" else [])


def test_image_that_is_asked_for_beside_another_ping_comes_from_the_same_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holders, "_own_node", lambda: "here")
    monkeypatch.setattr(holders, "_find", lambda _: None)
    monkeypatch.setattr(holders, "find_or_make", lambda *_, **__: pytest.fail("there is one"))
    found = FakeHolder("here")
    monkeypatch.setattr(HolderOfThisNode, "_deployment", found)
    request: Any = "request"
    key: Any = "key"

    async def scenario() -> None:
        holder = HolderOfThisNode()
        await holder.ping()
        asked, answers = asyncio.Event(), asyncio.Event()

        async def slowly() -> str:
            asked.set()
            await answers.wait()
            return "here"

        monkeypatch.setattr(found.ping, "remote", slowly)
        pinging = asyncio.create_task(holder.ping())
        await asked.wait()
        assert await holder.acquire(request, key, "me") == "its grant"
        answers.set()
        await pinging

    asyncio.run(scenario())
