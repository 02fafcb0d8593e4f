"""Traces: what is read, what is refused, and which model gets what."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from serve_app.bench.many.trace import SAMPLE, Arrival, cut, deal, read_trace, with_apps

HEAD = "arrival_s,app,prompt_tokens,output_tokens\n"


def arrivals(*apps: str | None) -> list[Arrival]:
    return [Arrival(float(at_s), app, 10, 5) for at_s, app in enumerate(apps)]


def test_csv_and_csv_gz_are_the_same_in_the_order_of_arrival(tmp_path: Path) -> None:
    text = HEAD + "2.5,b,20,2\n0.0,a,10,1\n"
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == [Arrival(0.0, "a", 10, 1), Arrival(2.5, "b", 20, 2)]
    assert read_trace(packed) == read_trace(plain)


def test_trace_of_one_service_has_no_apps(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,day\n1,10,1,monday\n")
    assert read_trace(file) == [Arrival(1.0, None, 10, 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no column arrival_s, prompt_tokens, output_tokens; found nothing"),
        ("arrival_s,app\n", "no column prompt_tokens, output_tokens; found arrival_s, app"),
        (HEAD, "no requests in it"),
        (
            HEAD + "0,a,10,1\nsoon,a,10,1\n",
            "line 3: arrival_s must be a number, 0 or more, found soon",
        ),
        (HEAD + "-1,a,10,1\n", "line 2: arrival_s must be a number, 0 or more, found -1"),
        (HEAD + "nan,a,10,1\n", "line 2: arrival_s must be a number"),
        (HEAD + "0,a,10\n", "line 2: output_tokens must be a number, 0 or more, found nothing"),
        (HEAD + "0,a,0,1\n", "line 2: prompt_tokens must be a whole number, 1 or more, found 0"),
        (
            HEAD + "0,a,1,1.5\n",
            "line 2: output_tokens must be a whole number, 1 or more, found 1.5",
        ),
        (HEAD + "0,,1,1\n", "line 2: app is empty"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_trace(file)


CUT_SHORT = gzip.compress((HEAD + "0,a,10,1\n" * 999).encode(), mtime=0)[
    :-12
]  # part of a test's name


@pytest.mark.parametrize(
    ("name", "content"), [("t.csv.gz", b"no gzip"), ("t.csv.gz", CUT_SHORT), ("t.csv", b"\xff")]
)
def test_file_of_another_kind_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"not a csv or csv\.gz"):
        read_trace(tmp_path / name)


def test_shipped_samples_are_small_and_named_with_source_and_licence() -> None:
    told = (SAMPLE.parent / "README.md").read_text()
    assert "CC-BY 4.0" in told
    assert "Apache-2.0" in told
    files = sorted(SAMPLE.parent.glob("*.gz"))
    assert len(files) == 2
    for file in files:
        assert file.name in told
        assert file.stat().st_size < 100 * 2**10
        found = read_trace(file)
        assert 500 < found[-1].at_s < 600
        assert f"{len(found):,} requests" in told
    assert len({arrival.app for arrival in read_trace(SAMPLE)}) == 16


def test_times_are_scaled_before_they_are_cut() -> None:
    found = cut(arrivals("a", "b", "c", "d"), 0.5, 1.0)
    assert [(each.app, each.at_s) for each in found] == [("a", 0.0), ("b", 0.5)]
    assert len(cut(arrivals("a", "b"), 3.0, None)) == 2


def test_busiest_app_goes_to_the_first_model_and_the_rest_is_left_out() -> None:
    sent = arrivals("x", "y", "y", "z", "y", "x", "w")
    assert [model for _, model in deal(sent, 2, ["one", "two"])] == [
        *("two", "one", "one", "one", "two")
    ]


def test_more_apps_than_models_go_around() -> None:
    sent = arrivals("x", "x", "x", "y", "y", "z")
    found = deal(sent, 3, ["one", "two"])
    assert Counter(model for _, model in found) == {"one": 4, "two": 2}


def test_trace_without_apps_is_dealt_by_a_power_law_and_always_the_same() -> None:
    sent = arrivals(*[None] * 4000)
    found = with_apps(sent, 3, seed=0)
    assert found == with_apps(sent, 3, seed=0)
    asked = Counter(each.app for each in found)
    weights = [1, 2**-0.9, 3**-0.9]
    for app, weight in zip("012", weights, strict=True):
        assert asked[app] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_apps_of_the_trace_itself_stay() -> None:
    sent = arrivals("x", "y")
    assert with_apps(sent, 5, seed=0) == sent
