"""Peers over Ray Serve: the replicas of the ingress's own deployment."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from serve_app.front.peers import Answers, News
from serve_app.models.client import outcomes_within

logger = logging.getLogger(__name__)


class ServePeers:
    """The other replicas of the deployment that this process is one of."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._own = context.replica_id.unique_id
        self._handle = serve.get_deployment_handle(context.deployment, context.app_name)

    async def loads(self, within_s: float) -> Answers:
        return await self._ask(within_s, "tell_load")

    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        return await self._ask(within_s, "exchange", dict(news))

    async def _ask(self, within_s: float, method: str, *args: Any) -> Answers:
        """Ask all; the replica's own answer, which it needs no asking for, is left out."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        try:
            outcomes, silent = await outcomes_within(self._handle, deadline_s, method, *args)
        except DeploymentUnavailableError:  # Serve has not told the handle of anybody yet
            return Answers(silent=1)
        except TimeoutError:
            return Answers(silent=1)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        for failure in failed:
            logger.warning("a process of the ingress did not answer %s: %s", method, failure)
        told = [each for each in outcomes if isinstance(each, tuple)]
        return Answers([what for who, what in told if who != self._own], silent + len(failed))
