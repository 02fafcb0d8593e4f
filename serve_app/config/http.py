"""Limits of the HTTP front, and who may use it."""

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serve_app.config.bounds import Bytes, Count, Seconds
from serve_app.config.keys import KeysFile, refuse_keys

MAX_NAME_CHARS = 256  # of a model

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*A-Z]+")
_OF_SCHEME = re.compile(r"http://.*:80|https://.*:443")  # ports that browsers leave out
_HOST = re.compile(r"\w([\w.-]*\w)?", re.ASCII)


class HttpSettings(BaseModel):
    """Limits of the HTTP front."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_body_bytes: Bytes = Field(
        default=8 * 1024**2,
        description="Bytes of a request body; a larger one gets 413.",
    )
    body_timeout_s: Seconds = Field(
        default=60.0,
        description="Seconds for a request body to arrive; a slower one gets 408.",
    )
    max_continuations: Count = Field(
        default=1024,
        description="Prompts times `n` in one completions request. 64 prompts of one are answered at a time.",
    )
    max_continuations_in_flight: Count = Field(
        default=8192,
        description="Prompts times `n` of all requests that one ingress process answers at once; what would "
        "be more gets 429.",
    )
    max_body_bytes_in_flight: Bytes = Field(
        default=256 * 1024**2,
        description="Bytes of the bodies of these requests; what would be more gets 429.",
    )
    max_logprobs_in_flight: Count = Field(
        default=2**23,
        description="Log-probabilities of answers that are not streamed and not complete, some 200 bytes each; "
        "an answer that would have more ends with 429.",
    )
    max_share_per_key: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of these that the requests with one key may have, so that other keys find room.",
    )
    keepalive_after_s: Seconds = Field(
        default=10.0,
        description="Seconds a stream waits for its first token before it sends headers and a "
        "keep-alive. Until then an error still has an HTTP status of its own.",
    )
    keepalive_interval_s: Seconds = Field(
        default=10.0,
        description="Seconds after which a stream that has had nothing to send, as while a tool call is "
        "written, sends another keep-alive.",
    )
    request_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds for a whole answer that is not streamed.",
    )
    queue_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds a request waits for its first token, in a queue, for a wake or for a "
        "replica that starts, before it gets 503.",
    )
    status_timeout_s: Seconds = Field(
        default=1.0,
        description="Seconds to wait for the replicas' own account.",
    )
    api_keys_file: KeysFile | None = Field(
        default=None,
        description="File with the keys for inference, one per line, `name:key` or the key alone; "
        "others than its owner and group may not read it. Without it and SLEEPSERVE_API_KEYS inference "
        "needs no key.",
    )
    admin_keys_file: KeysFile | None = Field(
        default=None,
        description="The same of the keys for sleep, wake, scale and status; the variable is "
        "SLEEPSERVE_ADMIN_KEYS.",
    )
    max_concurrent_requests_per_key: Count | None = Field(
        default=None,
        description="Requests with one key that one ingress process answers at once; a further one gets 429. "
        "Beside a GPU there are four such processes, unless `deployments` says otherwise. No limit when absent.",
    )
    cors_allow_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose pages may use this server and read its answers, as "
        "`https://chat.example.com`; `*` for all. Pages of others are refused where there is no key.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names by which clients without a key reach this server, as `gpu-box.example.com`, besides "
        "loopback's, the machine's own and literal addresses.",
    )

    _no_keys = model_validator(mode="before")(refuse_keys)

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        for one, all_, setting in (
            (self.max_continuations, self.max_continuations_in_flight, "max_continuations"),
            (self.max_body_bytes, self.max_body_bytes_in_flight, "max_body_bytes"),
        ):
            if one > (most := int(all_ * self.max_share_per_key)):
                raise ValueError(
                    f"{setting} is {one}, but one key may have {most} in flight "
                    f"({setting}_in_flight times max_share_per_key); no such request could be answered"
                )
        return self

    @field_validator("cors_allow_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; write scheme://host or scheme://host:port, without a path, a "
                    "wildcard or capitals"
                )
            if _OF_SCHEME.fullmatch(origin):
                raise ValueError(f"browsers send {origin!r} without its port; leave that out")
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host's name; write just that, without a scheme, a port or a wildcard"
                )
        return hosts
