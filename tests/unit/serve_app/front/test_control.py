"""Models, sleep and wake, replicas, health: routes that ask for no tokens."""

import asyncio
import json
from dataclasses import replace

import pytest
from openai.types import Model
from starlette.requests import Request

from actors.errors import DrainTimeout, Unavailable
from actors.protocol import ReplicaState, SleepCommand, SleepMode
from serve_app.front.health import Health
from serve_app.models.registry import ServedModels
from serve_app.openai.requests import ModelQuery
from tests.fakes import FakeModel
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY, conforms, is_error, scope_of, serving


def test_models(client):
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    conforms(Model, card)
    assert card == {
        "id": "fake",
        "object": "model",
        "created": 1700000000,
        "owned_by": "sleepserve",
        "root": "checkpoint-of-fake",
        "parent": None,
        "max_model_len": 4096,
        "status": {"value": "loaded"},
    }
    assert client.get("/v1/models/fake").json() == card


def test_model_whose_name_has_slashes():
    with serving(FakeModel("org/name")) as client:
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"


def test_max_model_len_before_there_is_a_replica():
    with serving(FakeModel(states=[])) as client:
        assert client.get("/v1/models/fake").json()["max_model_len"] is None


S = ReplicaState


@pytest.mark.parametrize(
    ("states", "value"),
    [
        ([S.AWAKE], "loaded"),
        ([S.DRAINING], "loaded"),
        ([S.ASLEEP, S.WAKING, S.AWAKE], "loaded"),
        ([S.ASLEEP, S.WAKING], "loading"),
        ([S.ASLEEP, S.FAILED], "sleeping"),
        ([S.FAILED], "unloaded"),
        ([], "unloaded"),
    ],
)
def test_model_status(states, value):
    model = FakeModel(states=states)
    with serving(model) as client:
        assert client.get("/v1/models/fake").json()["status"] == {"value": value}
    assert model.orders == []
    assert model.requests == []


@pytest.mark.parametrize(("known", "value"), [(True, "loading"), (False, "unloaded")])
def test_model_whose_first_replica_starts_is_loading(known, value, monkeypatch):
    model = FakeModel(states=[])
    model.scaler.scale = replace(model.scaler.scale, target=1)
    if not known:
        monkeypatch.setattr(model.scaler, "read", not_deployed)
    with serving(model) as client:
        assert client.get("/v1/models/fake").json()["status"] == {"value": value}


def test_model_that_serve_has_given_up_starting_has_failed():
    given_up, other = FakeModel(states=[]), FakeModel("other")
    given_up.scaler.scale = replace(given_up.scaler.scale, target=1, gave_up=True)
    with serving(given_up, other) as client:
        assert client.get("/v1/models/fake").json()["status"] == {"value": "failed"}
        one, both = client.get("/health?model=fake"), client.get("/health")
    assert (one.status_code, one.json()["models"]) == (503, {"fake": "failed"})
    assert (both.status_code, both.json()["status"]) == (200, "degraded")


async def not_deployed():
    raise Unavailable("model:fake is not deployed")


def test_model_answers_to_its_other_names():
    model, other = FakeModel(), FakeModel("other")
    model.info = replace(model.info, aliases=("gpt", "gpt-mini"))
    with serving(model, other) as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert list(cards) == ["fake", "other", "gpt", "gpt-mini"]
        assert client.get("/v1/models/gpt").json() == cards["gpt"]
        answer = client.post(CHAT, json={**CHAT_BODY, "model": "gpt-mini"}).json()
        assert answer["model"] == "fake"
        assert list(client.post("/sleep?model=gpt").json()["models"]) == ["fake"]
        refused = client.post(CHAT, json={**CHAT_BODY, "model": "gpt-4"})
        assert "served: fake, other, gpt, gpt-mini" in refused.json()["error"]["message"]


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_silent_replicas_do_not_block(how):
    model, other = FakeModel("a"), FakeModel("b")
    model.hang_status = how == "hangs"
    model.fail_control = RuntimeError("the handle is broken") if how == "fails" else None
    with serving(model, other, status_timeout_s=0.01) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["status"]["value"] for card in cards] == ["unknown", "loaded"]
        assert client.get("/health").status_code == 200
        if how == "hangs":
            is_error(client.get("/is_sleeping"), 503, "unavailable")
        else:
            is_error(client.get("/is_sleeping"), 500, "internal_error")


# --- sleep and wake ---


@pytest.mark.parametrize(
    ("query", "body", "command"),
    [
        ("", None, SleepCommand()),
        ("?level=2&mode=abort&hold=true", None, SleepCommand(2, SleepMode.ABORT, True)),
        ("", {"level": 2, "mode": "keep", "hold": True}, SleepCommand(2, SleepMode.KEEP, True)),
        ("?level=1&mode=keep", {"level": 2}, SleepCommand(2, SleepMode.KEEP)),
        ("?model=fake", {"level": None}, SleepCommand()),
    ],
)
def test_sleep(client, model, query, body, command):
    content = json.dumps(body) if body is not None else b""
    response = client.post(f"/sleep{query}", content=content)
    assert response.json()["code"] == 200
    (replica,) = response.json()["models"]["fake"]
    assert replica["state"] == "asleep"
    assert replica["last_sleep_s"] == 0.2
    assert model.orders == [command]


def test_status_has_the_device_s_figures_and_the_last_wake_s(client):
    client.post("/sleep")
    (replica,) = client.post("/sleep").json()["models"]["fake"]
    assert replica["device_memory"] == {
        "total": 9000,
        "free": 4000,
        "own": None,
        "released_by_last_sleep": 2048,
        "own_released_by_last_sleep": None,
        "left": {
            "context": 600,
            "graphs": 200,
            "kept_layers": 0,
            "torch_reserve": 30,
            "other": 4,
        },
    }
    assert replica["last_wake"] == {
        "copied_bytes": 1024,
        "link_s": 0.5,
        "link_gb_per_s": 2.048e-6,
        "checked_segments": 3,
        "checked_bytes": 1024,
        "check_s": 0.25,
        "intact": True,
    }
    (replica,) = client.post("/wake_up").json()["models"]["fake"]
    (replica,) = client.post("/wake_up").json()["models"]["fake"]
    assert replica["device_memory"]["left"] is None


@pytest.mark.parametrize("path", ["/wake_up", "/wakeup"])
@pytest.mark.parametrize(
    ("query", "body", "tags"),
    [
        ("", None, ()),
        ("?tags=weights", None, ("weights",)),
        ("?tags=weights&tags=kv_cache", None, ("weights", "kv_cache")),
        ("", {"tags": ["kv_cache"]}, ("kv_cache",)),
        ("?tags=weights", {"tags": "kv_cache"}, ("kv_cache",)),
    ],
)
def test_wake_up(client, model, path, query, body, tags):
    response = client.post(f"{path}{query}", content=json.dumps(body) if body else b"")
    assert response.json()["models"]["fake"][0]["state"] == "awake"
    assert model.orders == [tags]


def test_sleep_and_wake_twice(client):
    for _ in range(2):
        assert client.post("/sleep").json()["code"] == 200
        assert client.get("/is_sleeping").json()["sleeping"] is True
    for _ in range(2):
        assert client.post("/wake_up").json()["code"] == 200
        assert client.get("/is_sleeping").json()["sleeping"] is False


def test_sleep_one_of_two_models():
    one, two = FakeModel("one"), FakeModel("two")
    with serving(one, two) as client:
        assert set(client.post("/sleep?model=two").json()["models"]) == {"two"}
        assert one.orders == []
        assert client.get("/is_sleeping").json() == {
            "is_sleeping": False,
            "sleeping": False,
            "models": {"one": False, "two": True},
        }
        assert client.get("/is_sleeping?model=two").json()["is_sleeping"] is True
        assert set(client.post("/sleep").json()["models"]) == {"one", "two"}
        assert client.get("/is_sleeping").json()["is_sleeping"] is True


def test_sleep_that_fails_for_one_model_still_reaches_the_other():
    one, two = FakeModel("one"), FakeModel("two")
    one.fail_control = DrainTimeout("3 requests did not finish", 5)
    with serving(one, two) as client:
        is_error(client.post("/sleep"), 503, "drain_timeout")
    assert two.orders == [SleepCommand()]


@pytest.mark.parametrize(
    ("states", "sleeping"),
    [
        ([S.ASLEEP, S.ASLEEP], True),
        ([S.ASLEEP, S.WAKING], False),
        ([S.DRAINING], False),
        ([], False),
    ],
)
def test_is_sleeping(states, sleeping):
    model = FakeModel(states=states)
    with serving(model) as client:
        assert client.get("/is_sleeping").json() == {
            "is_sleeping": sleeping,
            "sleeping": sleeping,
            "models": {"fake": sleeping},
        }
    assert not model.asked_for_status  # which looks at the device


# --- how many replicas ---


@pytest.mark.parametrize(
    ("path", "body", "before", "target", "message"),
    [
        ("/scaleout", {}, 2, 3, "2 -> 3: 1 will start"),  # the seed's curl has no body
        ("/scaleout", {"replicas": 4}, 2, 4, "2 -> 4: 2 will start"),
        ("/scaleout", {"replicas": 2}, 2, 2, "2 replicas are wanted already"),
        ("/scaleout", {"replicas": 1}, 2, 2, "2 replicas are wanted already"),
        ("/scalein", {}, 2, 1, "2 -> 1: 1 will stop, after what it has in flight"),
        ("/scalein", {"replicas": 1}, 3, 1, "3 -> 1: 2 will stop, after what it has in flight"),
        ("/scaleout", {"replicas": 0}, 2, 2, "2 replicas are wanted already"),
        ("/scalein", {"replicas": 4}, 3, 3, "3 replicas are wanted already"),
        ("/scalein", {"replicas": 5}, 3, 3, "3 replicas are wanted already"),
    ],
)
def test_scale(path, body, before, target, message):
    model = FakeModel(states=[S.AWAKE] * before)
    with serving(model) as client:
        answer = client.post(path, content=json.dumps(body) if body else b"").json()
        assert answer == {
            "code": 200,
            "model": "fake",
            "before": before,
            "target": target,
            "message": message,
        }
        assert model.scaler.written == ([target] if target != before else [])
        if "replicas" in body:  # saying it twice changes nothing
            again = client.post(path, json=body).json()
            assert (again["before"], again["target"]) == (target, target)
            assert len(model.scaler.written) <= 1


@pytest.mark.parametrize(
    ("path", "replicas", "said"),
    [("/scaleout", 5, "more than 4"), ("/scalein", 0, "fewer than 1"), ("/scalein", -1, "")],
)
def test_scale_out_of_bounds_is_refused(client, model, path, replicas, said):
    response = client.post(f"{path}?replicas={replicas}")
    is_error(response, 400, "invalid_request_error", "replicas")
    assert said in response.json()["error"]["message"]
    assert model.scaler.written == []


def test_scale_needs_a_model_where_there_are_two():
    one, two = FakeModel("one"), FakeModel("two")
    with serving(one, two) as client:
        is_error(client.post("/scaleout"), 400, "invalid_request_error", "model")
        assert client.post("/scaleout?model=two").json()["target"] == 2
        is_error(client.post("/scalein?model=three"), 404, "model_not_found", "model")
    assert one.scaler.written == []


def test_replicas_tells_what_is_wanted_and_what_there_is():
    with serving(FakeModel(states=[S.AWAKE, S.ASLEEP])) as client:
        client.post("/scaleout?replicas=3")
        told = client.get("/replicas").json()["models"]["fake"]
    assert (told["target"], told["min_replicas"], told["max_replicas"]) == (3, 1, 4)
    assert [replica["state"] for replica in told["replicas"]] == ["awake", "asleep"]


# --- health and the rest ---


@pytest.mark.parametrize(
    ("states", "state", "status"),
    [
        ([S.AWAKE], "awake", 200),
        ([S.ASLEEP], "asleep", 200),
        ([S.WAKING], "waking", 200),
        ([S.FAILED, S.ASLEEP], "asleep", 200),
        ([S.FAILED], "failed", 503),
        ([S.FAILED, S.FAILED], "failed", 503),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_health_of_one_model_and_of_all(states, state, status, method):
    """A broken model fails its own readiness, and not that of the others."""
    with serving(FakeModel("ok"), FakeModel("fake", states=states)) as client:
        both = client.request(method, "/health")
        one = client.request(method, "/health?model=fake")
        is_error(client.request(method, "/health?model=other"), 404, "model_not_found", "model")
        is_error(client.request(method, "/health?modle=a"), 400, "invalid_request_error", "modle")
    assert both.status_code == 200
    assert both.json() == {
        "status": "degraded" if status == 503 else "healthy",
        "serving": 1 if status == 503 else 2,
        "starting": 0,
        "failed": 1 if status == 503 else 0,
        "models": {"ok": "awake", "fake": state},
    }
    assert one.status_code == status
    assert one.json()["models"] == {"fake": state}
    with serving(FakeModel(states=states)) as client:
        assert client.request(method, "/health").status_code == status


@pytest.fixture
def starts() -> FakeModel:
    """A model that is to have a replica, and has none yet."""
    model = FakeModel(states=[])
    model.scaler.scale = replace(model.scaler.scale, target=1)
    return model


def test_model_is_not_ready_before_its_first_replica_was(starts):
    with serving(FakeModel("ok"), starts) as client:
        one, both = client.get("/health?model=fake"), client.get("/health")
    assert (one.status_code, both.status_code) == (503, 200)
    told = {"status": "starting", "serving": 0, "starting": 1, "failed": 0}
    assert one.json() == {**told, "models": {"fake": "starting"}}
    assert both.json()["status"] == "healthy"
    assert (both.json()["serving"], both.json()["starting"]) == (1, 1)


def test_one_starts_and_one_has_failed_so_none_is_ready(starts):
    with serving(FakeModel("broken", states=[S.FAILED]), starts) as client:
        answer = client.get("/health")
    assert answer.status_code == 503
    told = {"status": "starting", "serving": 0, "starting": 1, "failed": 1}
    assert answer.json() == {**told, "models": {"broken": "failed", "fake": "starting"}}


def test_model_that_requests_start_is_ready(starts):
    """Also while it starts for one of them."""
    starts.scaler.scale = replace(starts.scaler.scale, target=0, least=0)
    for target, state in ((0, "unloaded"), (1, "loading")):
        starts.scaler.scale = replace(starts.scaler.scale, target=target)
        with serving(starts) as client:
            answer = client.get("/health")
        assert (answer.status_code, answer.json()["models"]) == (200, {"fake": state})


def test_model_that_was_ready_once_stays_so_while_its_replica_is_replaced(starts):
    async def scenario() -> None:
        now_s = 0.0
        served = ServedModels({"fake": starts}, status_timeout_s=1.0)
        health = Health(served, True, lambda: now_s)
        request = Request(scope_of("/health", "GET"))
        for states, state, status in (
            ([], "starting", 503),
            ([S.ASLEEP], "asleep", 200),
            ([], "loading", 200),
        ):
            starts.states = states
            answer = await health.ready(request, ModelQuery())
            assert (answer.status_code, json.loads(answer.body)["models"]["fake"]) == (
                status,
                state,
            )
            now_s += 2.0

    asyncio.run(scenario())


def test_model_whose_scale_cannot_be_told_has_not_failed(starts, monkeypatch):
    monkeypatch.setattr(starts.scaler, "read", not_deployed)
    with serving(starts) as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.json()["models"]) == (200, {"fake": "unknown"})


def test_health_is_asked_of_replicas_once_a_second_and_of_no_device():
    model = FakeModel()
    with serving(model) as client:
        for _ in range(20):
            assert client.get("/health").status_code == 200
    assert model.asked_for_states == 1
    assert not model.asked_for_status


def test_health_that_many_ask_for_at_once_is_asked_for_once():
    async def scenario() -> None:
        model, now_s = FakeModel(), 0.0
        model.hang_status = True
        served = ServedModels({"fake": model}, status_timeout_s=0.05)
        health = Health(served, True, lambda: now_s)
        request = Request(scope_of("/health", "GET"))
        for state in ("unknown", "awake"):
            model.asked_for_states = 0
            answers = await asyncio.gather(
                *(health.ready(request, ModelQuery()) for _ in range(50))
            )
            assert {json.loads(answer.body)["models"]["fake"] for answer in answers} == {state}
            assert model.asked_for_states == 1
            model.hang_status = False
            now_s += 2.0

    asyncio.run(scenario())


def test_ping_says_that_this_process_answers_whatever_the_models_do():
    model = FakeModel(states=[S.FAILED])
    model.hang_status = True
    with serving(model) as client:
        assert client.get("/ping").json() == {"status": "alive"}
    assert model.asked_for_states == 0


def test_version(client):
    version = client.get("/version").json()["version"]
    assert client.get("/").json()["version"] == version
    fingerprint = client.post(CHAT, json=CHAT_BODY).json()["system_fingerprint"]
    assert fingerprint == f"sleepserve-{version}"


# --- typing errors ---


@pytest.mark.parametrize(
    ("method", "path", "body", "key", "hint"),
    [
        ("POST", "/sleep?modell=a", None, "modell", "; did you mean model?"),
        ("POST", "/sleep", {"modell": "a"}, "modell", "; did you mean model?"),
        ("POST", "/sleep", {"modell": None}, "modell", "; did you mean model?"),
        ("POST", "/sleep?hold=true&lvl=2", None, "lvl", "; did you mean level?"),
        ("POST", "/wake_up?tag=weights", None, "tag", "; did you mean tags?"),
        ("POST", "/wakeup?x=1", None, "x", "; known are model, tags"),
        ("POST", "/scaleout?replica=3", None, "replica", "; did you mean replicas?"),
        ("POST", "/scalein", {"replicaz": 0}, "replicaz", "; did you mean replicas?"),
        ("GET", "/is_sleeping?modle=a", None, "modle", "; did you mean model?"),
        ("POST", "/sleep?modle=a", None, "modle", "; did you mean model?"),
        ("GET", "/replicas?modle=a", None, "modle", "; did you mean model?"),
        ("GET", "/tokenizer_info?modle=a", None, "modle", "; did you mean model?"),
        ("GET", "/status?model=a", None, "model", "; nothing is known"),
        ("GET", "/status/events?model=a", None, "model", "; nothing is known"),
    ],
)
def test_unknown_key_of_an_order_is_no_order_to_everybody(
    client, model, method, path, body, key, hint
):
    error = is_error(client.request(method, path, json=body), 400, "invalid_request_error", key)
    assert error["message"] == f"{key} is unknown here{hint}"
    assert model.orders == []
    assert model.scaler.written == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("POST", "/health"),
        ("GET", "/is_sleeping"),
        ("GET", "/replicas"),
        ("GET", "/tokenizer_info"),
        ("GET", "/status"),
        ("GET", "/status/events"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/scaleout"),
        ("POST", "/scalein"),
    ],
)
@pytest.mark.parametrize("query", ["model=" + "a" * 4096, "model=fake&" * 64])
def test_query_longer_than_any_route_needs_is_refused(client, model, method, path, query):
    error = is_error(client.request(method, f"{path}?{query}"), 400, "invalid_request_error")
    assert "the limits are 4096 and 64" in error["message"]
    assert model.orders == []
    assert model.scaler.written == []


def test_scale_order_is_bounded_by_a_setting_that_is_named(client, model):
    error = is_error(
        client.post("/scaleout?replicas=100000000"), 400, "invalid_request_error", "replicas"
    )
    assert "more than 4, the most (autoscaling.max_replicas)" in error["message"]
    assert model.scaler.written == []
