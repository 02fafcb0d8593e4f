"""Tokens of one continuation to the events its client sees: text, stop strings, the end."""

from array import array
from collections.abc import Sequence

from actors.protocol import FinishReason, MessageForm, TokenEvent, TokenLogprob
from actors.text.detokenizer import StreamDecoder


class StopStrings:
    """Stop strings as an Aho-Corasick automaton (Aho, Corasick 1975), for any number of texts at once.

    Nothing changes in it once it is made, which takes a microsecond a character.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}  # state and character -> state
        self._shorter = array("I", [0])  # the state of the longest proper suffix
        self._stop: dict[int, str] = {}  # the longest stop string a state ends with
        self._depth = array("I", [0])
        for stop in stops:
            state = 0
            for char in stop:
                child = self._next.setdefault((state, char), len(self._depth))
                if child == len(self._depth):
                    self._depth.append(self._depth[state] + 1)
                    self._shorter.append(0)
                state = child
            self._stop[state] = stop
        self._leaves = set(self._next.values()) - {state for state, _ in self._next}
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state behind one more character; a text begins with 0. O(1) amortised."""
        while (found := self._next.get((state, char))) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return found

    def stop_at(self, state: int) -> str | None:
        """The longest stop string that has just come to its end."""
        return self._stop.get(state)

    def chars_held(self, state: int) -> int:
        """How long the longest end of the text is that a stop string could start with."""
        return self._depth[state]

    def passed_over(self, state: int) -> int:
        """The state where a stop string that was complete is none; only others may go on."""
        while state in self._leaves:
            state = self._shorter[state]
        return state

    def _link(self) -> None:
        # Breadth first: a suffix is shorter, so its own links are already there.
        for (state, char), child in sorted(
            self._next.items(), key=lambda edge: self._depth[edge[1]]
        ):
            if not state:
                continue
            self._shorter[child] = self.step(self._shorter[state], char)
            if (stop := self._stop.get(self._shorter[child])) is not None:
                self._stop.setdefault(child, stop)


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    The text ends where the first stop string is complete: nothing that comes later can change the
    answer, so generation can end there at once. If several are complete at the same character, the
    longest counts, so that none of it stays in the text. How the text is cut into pieces makes no
    difference. (vLLM checks once per token and takes the first in the list.)

    What is held back is exactly the longest end of the text that a stop string could start with.
    """

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._held = ""
        self._state = 0

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The part of the text that is certainly not in a stop string.

        Args:
            text: what came since the last call. After a match nothing more comes out.
            armed: False reads the text without ending it; a stop string that starts here may still
                be completed by later, armed text.
        """
        if self.matched is not None:
            return ""
        for i, char in enumerate(text):
            self._state = self._stops.step(self._state, char)
            if armed and (stop := self._stops.stop_at(self._state)) is not None:
                self.matched = stop
                before = (self._held + text[: i + 1])[: -len(stop)]
                self._held = ""
                return before
        self._state = self._stops.passed_over(self._state)
        pending = self._held + text
        split = len(pending) - self._stops.chars_held(self._state)
        self._held = pending[split:]
        return pending[:split]

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


class OutputAssembler:
    """Gathers the tokens of one continuation, and makes TokenEvents of them for whoever takes them.

    Tokens become text when they are taken, several at once under load; with stop strings at once,
    because they may end the continuation. Stop strings count from the token after the first
    `min_tokens`, as in vLLM; one that is completed later may start earlier. Neither the stop string
    nor the token that ended the sequence has text.

    Args:
        decoder: of its own, not shared.
        index: which continuation of the request.
        prompt_tokens: copied into every event.
        stops: stop strings; others may search for them at the same time.
        min_tokens: of the sampling parameters.
        form: goes with the first event.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        *,
        index: int = 0,
        prompt_tokens: int = 0,
        stops: StopStrings | None = None,
        min_tokens: int = 0,
        form: MessageForm | None = None,
    ) -> None:
        self.finish: FinishReason | None = None  # why it ended; None while it goes on
        self.final_event_sent = False  # the event with the finish reason has been taken
        self.cached_tokens = 0  # goes with every event
        self._decoder = decoder
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._matcher = None if stops is None else StopMatcher(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # What the next event is made of.
        self._undecoded: list[int] = []
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._stop_reason: str | int | None = None
        self._form = form

    @property
    def is_finished(self) -> bool:
        """Nothing more is taken in; the engine may cancel."""
        return self.finish is not None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        """Take new tokens in; nothing, once it is done.

        Args:
            token_ids: may be empty, with `finish`.
            logprobs: one per token; None if the request wants none.
            finish: why the engine ended the sequence. With STOP the last token is the one that
                ended it. A stop string found before that overrides it.
            stop_reason: for the event, with `finish`.
        """
        if self.is_finished:
            return
        assert logprobs is None or len(logprobs) == len(token_ids)
        with_text = token_ids[:-1] if finish is FinishReason.STOP else token_ids
        if self._matcher is None:
            self._undecoded += with_text
        else:
            read = self._search(self._matcher, with_text, finish is not None)
            if self._matcher.matched is not None:
                finish, stop_reason = FinishReason.STOP, self._matcher.matched
                if read is not None:
                    token_ids = token_ids[:read]
        self._token_ids += token_ids
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += logprobs[: len(token_ids)]
        if finish is not None:
            self.finish, self._stop_reason = finish, stop_reason

    def take(self) -> TokenEvent | None:
        """All that is new, if there is text or an end to tell; tokens without wait for the next."""
        if self._undecoded:
            self._text.append(self._decoder.push(self._undecoded))
            self._undecoded = []
        text, self._text = "".join(self._text), []
        if self.final_event_sent or not (text or self.is_finished):
            return None
        if self.is_finished and self._matcher is None:
            text += self._decoder.flush()
        event = TokenEvent(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids),
            prompt_tokens=self._prompt_tokens,
            finish_reason=self.finish,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            form=self._form,
            cached_tokens=self.cached_tokens,
        )
        self.final_event_sent = self.is_finished
        self._token_ids, self._logprobs, self._form = [], None, None
        return event

    def _search(self, matcher: StopMatcher, token_ids: Sequence[int], ends: bool) -> int | None:
        """Read tokens up to a stop string; how many, if one came before the end."""
        for read, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            self._text.append(self._feed(matcher, self._decoder.push((token_id,))))
            if matcher.matched is not None:
                return read
        if ends:
            self._text += (self._feed(matcher, self._decoder.flush()), matcher.flush())
        return None

    def _feed(self, matcher: StopMatcher, text: str) -> str:
        return matcher.feed(text, armed=self._num_tokens > self._min_tokens)
