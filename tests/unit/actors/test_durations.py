import pytest

from actors.durations import parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("300ms", 0.3),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("2us3ns", 2.003e-6),
        ("2µs", 2e-6),
        ("0", 0),
        ("0s", 0),
        ("-1m", -60),
        ("+1m", 60),
        ("1m1h", 3660),  # as Go: in any order
    ],
)
def test_duration_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "-1", "m", "5 m", "5m ", "5m\n", "5d", "5M", "1e3s", "٥m", "--5m", "1s" * 33]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration_s(text)
