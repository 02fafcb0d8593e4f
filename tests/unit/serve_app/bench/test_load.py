import pytest

from serve_app.bench.figures import as_text
from serve_app.bench.instance import Stages, Timed, read_from_disk
from serve_app.bench.load import STAGES, TO_DEVICE, Instance, Loads, ratios, tables


def instance(loading_s: float, origin: str = "image", storage: int = 0, loads: int = 0) -> Instance:
    """With a second each to attach, to pin and to copy."""
    stages = dict.fromkeys(STAGES, 1.0) | {"bytes": loading_s}
    return {
        "stages": stages,
        "to_device": dict(zip(TO_DEVICE, (loading_s - 1.0, 1.0, 1.0, 1.0), strict=True)),
        "image_from": origin,
        "loads": loads,
        "storage_bytes": storage,
        "cold": storage > 0,
        "seconds": sum(stages.values()),
        "up_seconds": sum(list(stages.values())[3:]),
    }


def result(instances: dict[str, Instance]) -> dict[str, object]:
    return {
        "instances": instances,
        "ratios": ratios(instances),
        "file_bytes": 100,
        "skipped": {},
        "complete": True,
    }


def test_ratio_of_loading_ends_with_the_bytes_on_the_device() -> None:
    found = ratios({"first": instance(15.0, loads=1), "second": instance(1.5)})
    assert found["first, to the device"] == pytest.approx(17.0 / 3.5)
    assert found["first, to the device, unpinned"] == pytest.approx(16.0 / 2.5)
    assert not any(name.endswith("loading") for name in found)  # of what is still on the host
    assert found["first, first token"] == pytest.approx(18.0 / 4.5)
    assert found["first, whole start"] == pytest.approx(21.0 / 7.5)


def test_no_ratio_without_the_second() -> None:
    assert ratios({"first": instance(15.0)}) == {}


def test_table_says_where_the_bytes_came_from() -> None:
    cold = {"first": instance(15.0, loads=1, storage=100), "second": instance(1.5)}
    text = "\n".join(as_text(tables(result(cold))))
    assert "disk, image" in text
    (read,) = (line for line in text.splitlines() if "the checkpoint was read" in line)
    assert read.split()[-3:] == ["once", "0", "times"]  # of the one that came from the image
    assert "not cold" not in text
    warm = {"first": instance(15.0, loads=1), "second": instance(1.5)}
    text = "\n".join(as_text(tables(result(warm))))
    assert "page cache, image" in text
    assert "first: not cold" in text


def test_table_tells_what_stands_before_the_bytes_on_the_device() -> None:
    cold = {"first": instance(15.0, loads=1, storage=100), "second": instance(1.5)}
    lines = [line.rsplit(maxsplit=2) for line in as_text(tables(result(cold)))]
    found = {name.strip(): values for name, *values in (line for line in lines if len(line) == 3)}
    assert found["read and pack"] == ["14.00", "0.50"]
    assert found["pin"] == ["1.00", "1.00"]
    assert found["together"] == ["17.00", "3.50"]
    assert found["without pin"] == ["16.00", "2.50"]


def test_loads_since_an_earlier_look() -> None:
    assert Loads(3, 100, 4.5).since(Loads(1, 60, 4.0)) == Loads(2, 40, 0.5)


def test_timed_function_tells_what_its_calls_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr("serve_app.bench.instance.time.monotonic", lambda: next(clock))
    timed = Timed(lambda x: x + 1)
    assert (timed(1), timed(2)) == (2, 3)
    assert timed.seconds == 2.75


def test_stages_are_seconds_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([11.0, 13.5])
    monkeypatch.setattr("serve_app.bench.instance.time.monotonic", lambda: next(clock))
    stages = Stages(10.0)
    stages.mark("one")
    stages.mark("two")
    assert stages.seconds == {"one": 1.0, "two": 2.5}


def test_storage_reads_are_counted() -> None:
    assert read_from_disk() >= 0
