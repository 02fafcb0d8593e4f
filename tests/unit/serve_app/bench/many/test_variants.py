"""Ways to share a card: what fits it, and what each has the configuration say."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.bench.many.variants import VARIANTS, Fits, Needs, fits, settings_for, without_keys
from serve_app.config.files import ARGS_OF

MANY = Path(__file__).parents[5] / "configs" / "many.yaml"


@pytest.fixture
def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANY.read_text())
    return found


def args_of(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, llm = (application["args"] for application in settings["applications"])
    return weights, llm


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_of_every_variant_are_valid_and_what_was_given_stays(
    settings: dict[str, Any], name: str
) -> None:
    before = copy.deepcopy(settings)
    changed = settings_for(VARIANTS[name], settings, Fits(3, 3))
    assert settings == before
    for application in changed["applications"]:
        ARGS_OF[application["import_path"]].model_validate(application["args"])


def test_each_variant_is_what_it_says(settings: dict[str, Any]) -> None:
    def args(name: str) -> dict[str, Any]:
        return args_of(settings_for(VARIANTS[name], settings, Fits(alone=3, beside_sleepers=2)))[1]

    def sharing(name: str) -> list[dict[str, Any]]:
        return [model["sharing"] for model in args(name)["models"]]

    assert args("shared") == args_of(settings)[1]
    assert [model["model_id"] for model in args("static")["models"]] == ["one", "two", "three"]
    assert all(each["pin"] for each in sharing("static") + sharing("infinite"))
    assert args("one-at-a-time")["card"] == {"memory_budget": "84 MiB", "max_awake_models": 1}
    assert args("lru")["card"] == {"memory_budget": "84 MiB", "max_awake_models": 2}
    # Who never wakes has nothing of a compressed image.
    for name, variant in VARIANTS.items():
        kept = all(model.get("image") == {"compression": "off"} for model in args(name)["models"])
        assert kept is not variant.wakes
    for each in sharing("lru"):
        assert each == {"min_awake_s": 0.0, "pin": False, "priority": 0, "max_wait_s": 30}
    restart = args("restart")
    assert restart["card"] == args("shared")["card"]
    for model in restart["models"]:
        assert model["sleep"] == {"idle_timeout_s": 60, "ends_worker": True}
        assert model["sharing"] == {"min_awake_s": 1, "max_wait_s": 30, "preempt": "drain"}
    assert len(args("infinite")["models"]) == 8
    assert args("infinite")["card"] == {"memory_budget": 0.9}


def test_images_are_held_of_those_alone_that_are_served(settings: dict[str, Any]) -> None:
    weights, _ = args_of(settings_for(VARIANTS["static"], settings, Fits(3, 3)))
    assert len(weights["models"]) == 3


def test_sleepers_take_room_from_who_is_awake() -> None:
    needs = [Needs(awake=10, residue=2)] * 8
    assert fits(36, needs) == Fits(alone=3, beside_sleepers=2)


def test_any_models_are_awake_at_once_not_only_the_small_ones() -> None:
    needs = [Needs(10, 0), Needs(10, 0), Needs(40, 0)]
    assert fits(50, needs) == Fits(alone=2, beside_sleepers=2)
    assert fits(45, needs) == Fits(alone=2, beside_sleepers=1)


def test_one_model_always_fits() -> None:
    assert fits(5, [Needs(10, 1)]) == Fits(1, 1)


def test_keys_are_for_other_servers(settings: dict[str, Any]) -> None:
    _, llm = args_of(settings)
    llm["http"] = {"api_keys_file": "keys", "admin_keys_file": "keys", "queue_timeout_s": 3}
    without_keys(settings)
    assert llm["http"] == {"queue_timeout_s": 3}
