import pytest

from serve_app.bench.instance import Stages, read_from_disk
from serve_app.bench.load import STAGES, Instance, ratios, report


def instance(loading_s: float, origin: str = "image", storage: int = 0, loads: int = 0) -> Instance:
    stages = dict.fromkeys(STAGES, 1.0) | {"bytes": loading_s}
    return {
        "stages": stages,
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


def test_ratio_of_loading_is_that_of_the_bytes_alone() -> None:
    found = ratios({"first": instance(15.0, loads=1), "second": instance(1.5)})
    assert found["first, loading"] == pytest.approx(10.0)
    assert found["first, first token"] == pytest.approx(18.0 / 4.5)
    assert found["first, whole start"] == pytest.approx(21.0 / 7.5)


def test_no_ratio_without_the_second() -> None:
    assert ratios({"first": instance(15.0)}) == {}


def test_table_says_where_the_bytes_came_from() -> None:
    cold = {"first": instance(15.0, loads=1, storage=100), "second": instance(1.5)}
    text = "\n".join(report(result(cold)))
    assert "disk, image" in text
    (read,) = (line for line in text.splitlines() if "the checkpoint was read" in line)
    assert read.split()[-3:] == ["once", "0", "times"]  # of the one that came from the image
    assert "not cold" not in text
    warm = {"first": instance(15.0, loads=1), "second": instance(1.5)}
    text = "\n".join(report(result(warm)))
    assert "page cache, image" in text
    assert "first: not cold" in text


def test_stages_are_seconds_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([11.0, 13.5])
    monkeypatch.setattr("serve_app.bench.instance.time.monotonic", lambda: next(clock))
    stages = Stages(10.0)
    stages.mark("one")
    stages.mark("two")
    assert stages.seconds == {"one": 1.0, "two": 2.5}


def test_storage_reads_are_counted() -> None:
    assert read_from_disk() >= 0
