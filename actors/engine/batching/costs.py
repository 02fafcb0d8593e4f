"""How long a step takes, from what steps were measured to take; and so how much of a prompt goes into the next."""

from bisect import bisect_left
from collections.abc import Sequence

_NEWEST = 0.1  # weight of a new measurement of a kind
_KEPT = 0.98  # weight of the earlier ones against each new one, where two costs are told apart
_FIRST_TOKENS = 256  # of prompts beside those that decode, as long as nothing was measured
_SLOWER = 2.0  # than a step without prompts, at most, where that alone reaches the target


class StepCosts:
    """Seconds of a step: to decode so many rows, per token of a prompt, per token and token in front of that.

    Pure arithmetic.
    """

    def __init__(self, target_s: float, sizes: Sequence[int]) -> None:
        """Make one that knows nothing.

        Args:
            target_s: what a step may take that holds prompts beside many sequences that decode.
            sizes: tokens that steps with prompts are padded to, ascending; at least one.
        """
        self._target_s = target_s
        self._sizes = sizes
        self._decode_s: dict[int, float] = {}  # by the number of rows, rounded up to a power of two
        # Sums over steps with prompts: of tokens^2, tokens * pairs, pairs^2, tokens * seconds, pairs * seconds.
        self._sums = [0.0] * 5

    def note(self, seconds: float, num_decoding: int, prompts: Sequence[tuple[int, int]]) -> None:
        """A step took so long on the device.

        Args:
            num_decoding: rows of one token.
            prompts: of each part of a prompt, its tokens and how many are in front of them.
        """
        if not prompts:
            bucket = _bucket(num_decoding)
            before = self._decode_s.get(bucket, seconds)
            self._decode_s[bucket] = before + _NEWEST * (seconds - before)
            return
        tokens = float(sum(count for count, _ in prompts))
        pairs = float(sum(count * (ahead + count / 2) for count, ahead in prompts))
        more = max(0.0, seconds - self._decoding_s(num_decoding))
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * more, pairs * more)
        self._sums = [_KEPT * old + added for old, added in zip(self._sums, new, strict=True)]

    def predict(self, num_decoding: int, tokens: int, ahead: int) -> float | None:
        """Seconds of a step with one part of a prompt; None before any such step was measured."""
        costs = self._per_prompt()
        if costs is None:
            return None
        per_token, per_pair = costs
        pairs = tokens * (ahead + tokens / 2)
        return self._decoding_s(num_decoding) + per_token * tokens + per_pair * pairs

    def prompt_tokens(self, num_decoding: int, ahead: int, num_waiting: int) -> int:
        """Tokens of prompts for a step beside so many rows that decode; a size full, and one at least.

        A longer step costs each that decodes its time, and saves time of each that waits: many tokens at once are
        computed faster than a few at a time. So where many wait and few decode, the target is as many times longer.
        A lone prompt has the target.

        Args:
            ahead: tokens in front of the first of the prompts.
            num_waiting: sequences whose prompts could be in the step.
        """
        limit_s = max(self._target_s, _SLOWER * self._decoding_s(num_decoding))
        limit_s *= 1 + max(0, num_waiting - 1) / num_decoding
        # Room for as many tokens as there are rows, so that prompts are not starved by those that decode.
        least = bisect_left(self._sizes, 2 * num_decoding)
        best = self._sizes[min(least, len(self._sizes) - 1)]
        for size in self._sizes[least:]:
            seconds = self.predict(num_decoding, size - num_decoding, ahead)
            if size <= _FIRST_TOKENS if seconds is None else seconds <= limit_s:
                best = size
        return max(1, best - num_decoding)

    def _decoding_s(self, rows: int) -> float:
        """Seconds of a step of so many rows; those of the next larger that was measured, or the largest."""
        if not rows or not self._decode_s:
            return min(self._decode_s.values(), default=0.0)  # the weights are read all the same
        known = sorted(self._decode_s)
        at = bisect_left(known, _bucket(rows))
        return self._decode_s[known[min(at, len(known) - 1)]]

    def _per_prompt(self) -> tuple[float, float] | None:
        """Seconds per token of a prompt, and per token and token in front; least squares, neither negative."""
        tt, tp, pp, ts, ps = self._sums
        if not tt:
            return None
        # Steps that are all alike tell the two apart no better than rounding does.
        determinant = tt * pp - tp * tp
        if determinant > 1e-6 * tt * pp:
            per_token = (ts * pp - ps * tp) / determinant
            per_pair = (ps * tt - ts * tp) / determinant
            if per_token >= 0 and per_pair >= 0:
                return per_token, per_pair
            if per_token < 0:
                return 0.0, ps / pp
        return ts / tt, 0.0


def _bucket(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
