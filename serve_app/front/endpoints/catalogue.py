"""Every endpoint, described once: `python -m serve_app.front.endpoints.catalogue` prints them as Markdown.

Routes, what the gate asks for, what is read of requests and /openapi.json are made of these descriptions, too.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from actors.protocol import ChatPrompt
from serve_app.anthropic import requests as anthropic
from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access
from serve_app.front.bodies import MAX_MESSAGE_BYTES, check_travels
from serve_app.front.dialects import ANTHROPIC
from serve_app.front.dialects import RESPONSES as RESPONSES_DIALECT
from serve_app.front.endpoints.endpoint import EVENTS, JSON, TEXT, Answer, Endpoint, Form
from serve_app.openai import requests, schemas
from serve_app.openai.fields import parse_form
from serve_app.openai.schemas import Schema, an_object, const, ref
from serve_app.responses import requests as responses

T = TypeVar("T")
A = TypeVar("A", bound=requests.Ask)
Model = TypeVar("Model", bound=BaseModel)

GET, POST = ("GET",), ("POST",)
PUBLIC, USERS, ADMINS = Access.PUBLIC, Access.INFERENCE, Access.ADMIN

_MAX_TOKENIZED_BYTES = 2**20  # of a text; its tokens are made in this process, in a second


def _sendable(ask: A) -> A:
    for prompt in ask.prompts:
        check_travels(prompt, MAX_MESSAGE_BYTES, ask.field_names.get("prompt", "prompt"))
    return ask


def _short(ask: requests.TokenizeAsk) -> requests.TokenizeAsk:
    param = "messages" if isinstance(ask.prompt, ChatPrompt) else "prompt"
    check_travels(ask.prompt, _MAX_TOKENIZED_BYTES, param)
    return ask


def _plain(model: type[Model], *, in_body: bool = False, in_query: bool = False) -> Form[Model]:
    """A form from which nothing else is made."""

    def parse(fields: Mapping[str, Any], settings: HttpSettings) -> Model:
        return parse_form(model, fields)

    return Form((model,), parse, in_body=in_body, in_query=in_query)


def _body(
    model: type[BaseModel], parse: Callable[[Mapping[str, Any]], T], bounded: Callable[[T], T]
) -> Form[T]:
    return Form((model,), lambda fields, settings: bounded(parse(fields)), in_body=True)


_NOTHING: Form[None] = Form((), lambda fields, settings: None)  # whatever is sent is not looked at
_NO_QUERY = _plain(requests.NoQuery, in_query=True)
_MODEL = _plain(requests.ModelQuery, in_query=True)
_SCALE = _plain(requests.ScaleForm, in_body=True, in_query=True)
_SLEEP = _plain(requests.SleepForm, in_body=True, in_query=True)
_WAKE = _plain(requests.WakeForm, in_body=True, in_query=True)
_DETOKENIZE = _plain(requests.DetokenizeForm, in_body=True)
_TOKENIZE = Form(
    (requests.TokenizeText, requests.TokenizeChat),
    lambda fields, _: _short(requests.parse_tokenize(fields)),
    in_body=True,
)
_CHAT = _body(requests.ChatBody, requests.parse_chat, _sendable)
_COMPLETION = Form(
    (requests.CompletionBody,),
    lambda fields, settings: _sendable(
        requests.parse_completion(fields, settings.max_continuations)
    ),
    in_body=True,
)
_RESPONSES = _body(responses.ResponsesBody, responses.parse_responses, _sendable)
_MESSAGES = _body(anthropic.MessagesBody, anthropic.parse_messages, _sendable)
_COUNT_TOKENS = _body(anthropic.CountTokensBody, anthropic.parse_count_tokens, _short)
_SEED = _body(requests.SeedBody, requests.parse_seed, _sendable)

_ANY_OBJECT: Schema = {"type": "object"}
_READY = Answer(
    ref("Health"), other_statuses={503: "All replicas have failed, or none was ready yet."}
)
_WHO_ANSWERS = an_object(message=schemas.TEXT, version=schemas.TEXT)
_FILES = Answer(None, ("text/html", "text/css", "text/javascript", "image/svg+xml"))


def _json(name: str, *other_kinds: str) -> Answer:
    return Answer(ref(name), (JSON, *other_kinds))


# Rows of a table, of each of which the formatter would make ten lines.
# fmt: off

# --- models and generation ---

MODELS = Endpoint(GET, "/v1/models", USERS, _NOTHING, _json("ModelList"), "The models; wakes none.")
MODEL = Endpoint(GET, "/v1/models/{model_id:path}", USERS, _NOTHING, _json("Model"),
    "One model; does not wake it.")
CHAT = Endpoint(POST, "/v1/chat/completions", USERS, _CHAT, _json("ChatCompletion", EVENTS),
    "OpenAI's chat.", is_load=True)
COMPLETION = Endpoint(POST, "/v1/completions", USERS, _COMPLETION, _json("Completion", EVENTS),
    "OpenAI's completions.", is_load=True)
RESPONSES = Endpoint(POST, "/v1/responses", USERS, _RESPONSES, _json("Response", EVENTS),
    "OpenAI's responses, none of which is kept.", is_load=True, dialect=RESPONSES_DIALECT)
MESSAGES = Endpoint(POST, "/v1/messages", USERS, _MESSAGES, _json("AnthropicMessage", EVENTS),
    "Anthropic's messages.", is_load=True, dialect=ANTHROPIC)
SEED_COMPLETION = Endpoint(POST, "/completions", USERS, _SEED, _json("Output", TEXT),
    "Plain text, or one object.", is_load=True)

# --- tokens ---

TOKENIZE = Endpoint(POST, "/tokenize", USERS, _TOKENIZE, _json("Tokens"),
    "Token ids of a text or of messages.")
COUNT_TOKENS = Endpoint(POST, "/v1/messages/count_tokens", USERS, _COUNT_TOKENS,
    _json("TokenCount"), "How many tokens Anthropic's messages are.", dialect=ANTHROPIC)
DETOKENIZE = Endpoint(POST, "/detokenize", USERS, _DETOKENIZE, _json("Detokenized"),
    "The text of token ids.")
TOKENIZER_INFO = Endpoint(GET, "/tokenizer_info", USERS, _MODEL, _json("TokenizerInfo"),
    "Special tokens, chat template.")

# --- for operators ---

SLEEP = Endpoint(POST, "/sleep", ADMINS, _SLEEP, _json("Controlled"),
    "Give the device memory back.")
WAKE_UP = Endpoint(POST, "/wake_up", ADMINS, _WAKE, _json("Controlled"), "Wake, and end a hold.")
WAKEUP = replace(WAKE_UP, path="/wakeup", is_documented=False)  # as some write it
IS_SLEEPING = Endpoint(GET, "/is_sleeping", ADMINS, _MODEL, _json("IsSleeping"),
    "Whether every replica is asleep.")
SCALEOUT = Endpoint(POST, "/scaleout", ADMINS, _SCALE, _json("Scaled"), "More replicas.")
SCALEIN = Endpoint(POST, "/scalein", ADMINS, _SCALE, _json("Scaled"), "Fewer replicas.")
REPLICAS = Endpoint(GET, "/replicas", ADMINS, _MODEL, _json("Replicas"),
    "How many, and how they are.")

# --- probes, which have no key (vLLM asks for none at these either), and figures ---

HEALTH = Endpoint(("GET", "POST"), "/health", PUBLIC, _MODEL, _READY,
    "Readiness; 200 while asleep, too; 503 before the first replica was ready.")
PING = Endpoint(("GET", "POST"), "/ping", PUBLIC, _NOTHING,
    Answer(an_object(status=const("alive"))), "Liveness.")
VERSION = Endpoint(GET, "/version", PUBLIC, _NOTHING, Answer(an_object(version=schemas.TEXT)),
    "Our version.")
LOAD = Endpoint(GET, "/load", USERS, _NOTHING, Answer(an_object(server_load=schemas.COUNT)),
    "Requests in flight.")
# For users, so that whoever scrapes needs no key that could put models to sleep
METRICS = Endpoint(GET, "/metrics", USERS, _NOTHING, Answer(None, (TEXT,)),
    "Prometheus' metrics; wakes none.", is_documented=False)
OPENAPI = Endpoint(GET, "/openapi.json", USERS, _NOTHING, Answer(_ANY_OBJECT), "This document.")

# --- the page. It is the same for everybody; what it shows comes from /status ---

HOME = Endpoint(GET, "/", PUBLIC, _NOTHING, Answer(_WHO_ANSWERS, ("text/html", JSON)),
    "The status page, or who answers.", is_documented=False)
PAGE = Endpoint(GET, "/page", PUBLIC, _NOTHING, _FILES,
    "The files of the status page.", is_documented=False)
STATUS = Endpoint(GET, "/status", ADMINS, _NO_QUERY, Answer(_ANY_OBJECT),
    "What the page shows.", is_documented=False)
STATUS_EVENTS = Endpoint(GET, "/status/events", ADMINS, _NO_QUERY, Answer(None, (EVENTS,)),
    "The same, whenever it has changed.", is_documented=False)

# fmt: on

# All of the above. `build_asgi` asserts that each is answered, and nothing else is.
ENDPOINTS = tuple(each for each in list(globals().values()) if isinstance(each, Endpoint))


def endpoints_table() -> str:
    """One row an endpoint."""
    head = "| endpoint | key | reads | answers | errors | what it is |\n|---|---|---|---|---|---|"
    return "\n".join([head, *map(_row, ENDPOINTS), ""])


def _row(endpoint: Endpoint[Any]) -> str:
    cells = (
        f"`{', '.join(endpoint.methods)} {endpoint.public_path}`",
        {Access.PUBLIC: "none", Access.INFERENCE: "any", Access.ADMIN: "admin"}[endpoint.access],
        _read(endpoint.form),
        _answered(endpoint.answer),
        ", ".join(map(str, (*endpoint.answer.other_statuses, *endpoint.errors))),
        endpoint.summary,
    )
    return f"| {' | '.join(cells)} |"


def _read(form: Form[Any]) -> str:
    """The fields of operators' forms; the bodies of others by their names in /openapi.json."""
    where = " or ".join(["query"] * form.in_query + ["body"] * form.in_body)
    if form.in_query:
        names = ", ".join(f"`{name}`" for model in form.models for name in model.model_fields)
    else:
        names = " or ".join(f"`{model.__name__}`" for model in form.models)
    return f"{where}: {names}" if names else ""


def _answered(answer: Answer) -> str:
    schema = answer.schema or {}
    named = schema.get("$ref", "").rpartition("/")[2]
    names = [named] if named else schema.get("properties", ())
    json = ", ".join(f"`{name}`" for name in names) or JSON
    return " or ".join(json if kind == JSON else kind for kind in answer.kinds)


if __name__ == "__main__":
    sys.stdout.write(endpoints_table())
