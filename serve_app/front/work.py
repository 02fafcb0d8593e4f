"""How much work this process has taken on, and the refusal of more: in continuations and bytes, not in requests."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from serve_app.config.http import HttpSettings
from serve_app.config.keys import ApiKey
from serve_app.front.errors import KeyBusy, ServerBusy


class Budget:
    """One kind of work: what may be in flight at once, and what of it one key may have."""

    def __init__(self, what: str, setting: str, limit: int, share_per_key: float) -> None:
        """Make an unused one.

        Args:
            what: its name in messages.
            setting: the key of `http` that says the limit.
            limit: of all requests together.
            share_per_key: of the limit; the rest is for other keys.
        """
        self._what = what
        self._setting = setting
        self._limit = limit
        self._limit_per_key = int(limit * share_per_key)
        self._taken: Counter[ApiKey] = Counter()
        self.in_flight = 0

    @classmethod
    def of(cls, settings: HttpSettings, what: str, setting: str) -> Self:
        """The one that a setting limits."""
        return cls(what, setting, getattr(settings, setting), settings.max_share_per_key)

    def take(self, key: ApiKey | None, count: int) -> None:
        """Take on more, for a key or for nobody in particular.

        Raises:
            ServerBusy, KeyBusy: it would be too much now; nothing was taken on.
        """
        if (found := self.in_flight + count) > self._limit:
            raise ServerBusy(
                f"with this request {found} {self._what} would be in flight; the limit is "
                f"{self._limit} (http.{self._setting})"
            )
        if key is not None:
            if (own := self._taken[key] + count) > self._limit_per_key:
                raise KeyBusy(
                    f"with this request {own} {self._what} of the key {key.name} would be in flight; "
                    f"the limit is {self._limit_per_key} (http.{self._setting} times "
                    "http.max_share_per_key)"
                )
            self._taken[key] = own
        self.in_flight = found

    def give_back(self, key: ApiKey | None, count: int) -> None:
        self.in_flight -= count
        if key is not None:
            self._taken[key] -= count
            if not self._taken[key]:
                del self._taken[key]  # keys come and go; counters must not gather


class Admission:
    """What one request has taken on so far."""

    def __init__(self, key: ApiKey | None) -> None:
        self._key = key
        self._taken: list[tuple[Budget, int]] = []

    def take(self, budget: Budget, count: int) -> None:
        """See `Budget.take`; given back when the request is over."""
        budget.take(self._key, count)
        self._taken.append((budget, count))

    def give_back(self) -> None:
        while self._taken:
            budget, count = self._taken.pop()
            budget.give_back(self._key, count)


@contextmanager
def admitted(key: ApiKey | None) -> Iterator[Admission]:
    """For as long as a request is being answered. Lives on the event loop."""
    admission = Admission(key)
    try:
        yield admission
    finally:
        admission.give_back()
