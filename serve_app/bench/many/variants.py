"""Ways to share one card, each as the configuration of a server of its own. Pure."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from serve_app.config.files import ARGS_OF, LLM

Settings = dict[str, Any]  # what a serve_config.yaml says

# Of the card: more than its models may take together, as the kernel and CUDA need the rest.
_WHOLE_CARD = 0.9


@dataclass(frozen=True, slots=True)
class Fits:
    """How many models are awake at once on a card with the budget; known once each was awake.

    Attributes:
        alone: where only these are served, the busiest of them.
        beside_sleepers: whichever they are, while the others sleep.
    """

    alone: int
    beside_sleepers: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What one model takes of the card, in bytes."""

    awake: int
    residue: int  # of its process, also asleep


def fits(budget: int, needs: Sequence[Needs]) -> Fits:
    """Count what fits a budget; the models in the order in which they would be chosen."""
    both = accumulate(each.awake + each.residue for each in needs)
    room = budget - sum(each.residue for each in needs)
    largest = accumulate(sorted((each.awake for each in needs), reverse=True))
    # One does, or it would not have started.
    return Fits(
        max(1, sum(size <= budget for size in both)),
        max(1, sum(size <= room for size in largest)),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """One way, in words and as what it makes of the settings that `bench many` was given.

    Attributes:
        wakes: whether models sleep and wake at all.
    """

    says: str
    change: Callable[[Settings, Fits], None]
    wakes: bool = True


def settings_for(variant: Variant, settings: Settings, fit: Fits) -> Settings:
    """A copy of the settings, as this way has them."""
    changed = copy.deepcopy(settings)
    variant.change(changed, fit)
    return changed


def card_of(settings: Settings) -> Settings:
    """`card`, as it stands there; empty where it does not."""
    card: Settings = _args_of_llm(settings).setdefault("card", {})
    return card


def without_keys(settings: Settings) -> None:
    """Whoever reaches the server may do everything."""
    http: Settings = _args_of_llm(settings).get("http", {})
    for name in ("api_keys_file", "admin_keys_file"):
        http.pop(name, None)


def _args_of_llm(settings: Settings) -> Settings:
    applications = settings["applications"]
    found: list[Settings] = [a["args"] for a in applications if a["import_path"] == LLM]
    return found[0]


def _for_each_model(settings: Settings, **changes: Mapping[str, object]) -> None:
    """Change groups of settings of all models, in either application."""
    for application in settings["applications"]:
        if application["import_path"] in ARGS_OF:
            for model in application["args"]["models"]:
                for group, values in changes.items():
                    model[group] = {**model.get(group, {}), **values}


def _without_policy(settings: Settings) -> None:
    """Models stay awake until another wants room, and none counts more than another."""
    plain = {"min_awake_s": 0.0, "pin": False, "priority": 0}
    _for_each_model(settings, sharing=plain, sleep={"idle_timeout_s": None})


def _without_sleep(settings: Settings) -> None:
    """Models stay awake; to compress their images would gain them nothing."""
    _for_each_model(settings, sharing={"pin": True}, image={"compression": "off"})


def _as_configured(settings: Settings, fit: Fits) -> None:
    pass


def _static(settings: Settings, fit: Fits) -> None:
    for application in settings["applications"]:
        if application["import_path"] in ARGS_OF:
            del application["args"]["models"][fit.alone :]
    _without_sleep(settings)


def _one_at_a_time(settings: Settings, fit: Fits) -> None:
    _without_policy(settings)
    card_of(settings)["max_awake_models"] = 1


def _lru(settings: Settings, fit: Fits) -> None:
    _without_policy(settings)
    card_of(settings)["max_awake_models"] = fit.beside_sleepers


def _restart(settings: Settings, fit: Fits) -> None:
    # Who freezes requests keeps their process: people's servers have none that could.
    _for_each_model(settings, sleep={"ends_worker": True}, sharing={"preempt": "drain"})


def _infinite(settings: Settings, fit: Fits) -> None:
    card = card_of(settings)
    card["memory_budget"] = _WHOLE_CARD
    card.pop("max_awake_models", None)
    _without_sleep(settings)


# Its server is always started: it tells what fits, and what the answers are.
AS_CONFIGURED = "shared"
# In the order in which they are measured.
VARIANTS: Mapping[str, Variant] = {
    AS_CONFIGURED: Variant("as configured", _as_configured),
    "static": Variant(
        "as many models as fit, always awake; the others are not served, their requests are missed",
        _static,
        wakes=False,
    ),
    "one-at-a-time": Variant(
        "one model awake; the next one when its turn comes, first come, first served",
        _one_at_a_time,
    ),
    "lru": Variant(
        "as many models awake as fit, by their number; for another one the longest idle sleeps",
        _lru,
    ),
    "restart": Variant(
        "as configured, but a process ends with each sleep, and a wake starts one from the image",
        _restart,
    ),
    "infinite": Variant(
        "all models awake, on the whole card instead of the budget", _infinite, wakes=False
    ),
}
