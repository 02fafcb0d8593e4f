"""The workers that look at a holder's images, asked over Ray: what they need, and to let go."""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from actors.holder.host_memory import ImageUse, Need
from actors.image.layout import ImageKey

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0  # a worker's event loop is free, unless it imports or hangs
_LET_GO_TIMEOUT_S = 60.0  # to unpin 100 GB, and what is still running on the device


def alive() -> set[str]:
    """Names of the actors there are: replicas that died never said goodbye."""
    return {actor["name"] for actor in list_named_actors(all_namespaces=True)}


class RayLookers:
    """Asks workers that are actors. Calls block, for a limited time; not for an event loop.

    A worker that does not answer is one that needs its image; one that has ended looks at nothing.
    """

    def uses(self, lessees: Mapping[ImageKey, Mapping[str, Any]]) -> dict[ImageKey, list[ImageUse]]:
        """What the lessees of each image need of it, all asked at once."""
        asked = {
            key: [worker.image_use.remote(key) for worker in workers.values() if worker is not None]
            for key, workers in lessees.items()
        }
        limit_s = time.monotonic() + _ANSWER_TIMEOUT_S
        silent = ImageUse(Need.AWAKE)
        found: dict[ImageKey, list[ImageUse]] = {
            key: [use for use in _answers(refs, limit_s, silent) if use is not None]
            for key, refs in asked.items()
        }
        nameless = {
            key: [name for name, worker in workers.items() if worker is None]
            for key, workers in lessees.items()
        }
        if any(nameless.values()):
            there = alive()
            for key, names in nameless.items():
                found[key] += [silent for name in names if name in there]
        return found

    def let_go(self, key: ImageKey, workers: Mapping[str, Any]) -> bool:
        """Whether nobody looks at the image any more. Each of them decides, and some may have let go anyhow."""
        asked = [worker.let_go.remote(key) for worker in workers.values() if worker is not None]
        limit_s = time.monotonic() + _LET_GO_TIMEOUT_S
        # None: it has ended.
        return all(answer is not False for answer in list(_answers(asked, limit_s, False)))


def _answers(refs: list[Any], limit_s: float, silent: Any) -> Iterator[Any]:
    """What each answers: None if its process has ended, `silent` if there is no answer in time."""
    for ref in refs:
        try:
            yield ray.get(ref, timeout=max(0.0, limit_s - time.monotonic()))
        except RayActorError:
            yield None
        except Exception as exc:  # noqa: BLE001  # whatever it was, its word was not given
            logger.warning("a worker does not say what it needs: %s: %s", type(exc).__name__, exc)
            yield silent
