"""Ray Serve's own autoscaling, without Ray: the classes of its controller, on a simulated clock.

Run as they are, from Ray 2.60: `DeploymentAutoscalingState` (ray/serve/_private/autoscaling_state.py), which merges
and averages the reports, applies upscale and downscale delays, factors and bounds, and calls the default policy,
`replica_queue_length_autoscaling_policy` (ray/serve/autoscaling_policy.py); `InMemoryMetricsStore`
(ray/serve/_private/metrics_utils.py), in which a handle keeps its samples.

Made anew, because it lives in an actor with an event loop: when a handle samples and reports
(`RouterMetricsManager` in ray/serve/_private/router.py, `ReportTimes` here), and the controller's loop, which asks every
5 s here instead of every 0.1 s.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.metrics_utils import QUEUED_REQUESTS_KEY, InMemoryMetricsStore
from ray.serve.config import AutoscalingConfig

from serve_app.config.autoscaling import AutoscalingConfig as SleepAwareConfig
from tests.simulation.simulate import Replica

_EPOCH_S = 1e9  # Serve's times are those of a wall clock


def serves_config(config: SleepAwareConfig) -> AutoscalingConfig:
    """The same settings in Serve's class, as far as Serve has them."""
    return AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing_requests,
        look_back_period_s=config.look_back_period_s,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        downscale_to_zero_delay_s=config.downscale_to_zero_delay_s,
    )


class ReportTimes:
    """When Serve samples, and when it reports: by default every 6 s and every 10 s."""

    def __init__(self, config: AutoscalingConfig) -> None:
        share = RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
        self._report_every_s = config.metrics_interval_s
        self._sample_every_s = min(share * config.look_back_period_s, self._report_every_s)
        self._next_sample_s = 0.0
        self._next_report_s = 0.0

    def due(self, now_s: float) -> tuple[bool, bool, float]:
        """Whether to sample, whether to report, and when one of the two is due next."""
        sample, report = now_s >= self._next_sample_s, now_s >= self._next_report_s
        if sample:
            self._next_sample_s += self._sample_every_s
        if report:
            self._next_report_s += self._report_every_s
        return sample, report, min(self._next_sample_s, self._next_report_s)


class ServesPolicy:
    """Serve's default, told by one handle."""

    def __init__(self, settings: SleepAwareConfig) -> None:
        config = serves_config(settings)
        self._id = DeploymentID(name="model", app_name="llm")
        self._look_back_s = config.look_back_period_s
        self._times = ReportTimes(config)
        self._store = InMemoryMetricsStore()
        self._clock = _Clock()
        self._state = autoscaling_state.DeploymentAutoscalingState(self._id)
        with self._clock.in_ray():
            info = DeploymentInfo(
                deployment_config=DeploymentConfig.from_default(autoscaling_config=config),
                replica_config=None,  # type: ignore[arg-type]  # not looked at
                start_time_ms=0,
                deployer_job_id="",
            )
            self._state.register(info, config.min_replicas)

    def sample(self, now_s: float, queued: int, replicas: Sequence[Replica]) -> float:
        at_s = _EPOCH_S + now_s
        sample, report, next_s = self._times.due(now_s)
        if sample:
            point: dict[Hashable, float] = {QUEUED_REQUESTS_KEY: float(queued)}
            point |= {self._replica_id(replica): float(replica.load) for replica in replicas}
            self._store.add_metrics_point(point, at_s)
        if report:
            self._report(at_s, [self._replica_id(replica) for replica in replicas])
        return next_s

    def wanted(self, now_s: float, target: int, replicas: Sequence[Replica]) -> int:
        self._clock.now_s = _EPOCH_S + now_s
        self._state.update_running_replica_ids([self._replica_id(r) for r in replicas])
        with self._clock.in_ray():
            return int(self._state.get_decision_num_replicas(target))

    def from_image(self) -> bool:
        """The holder of the image is not Serve's policy's to stop."""
        return True

    def _replica_id(self, replica: Replica) -> ReplicaID:
        return ReplicaID(f"{replica.number}", self._id)

    def _report(self, at_s: float, running: list[ReplicaID]) -> None:
        """As `RouterMetricsManager._get_metrics_report`."""
        self._store.prune_keys_and_compact_data(at_s - self._look_back_s)
        data = self._store.data
        self._clock.now_s = at_s
        with self._clock.in_ray():
            self._state.record_request_metrics_for_handle(
                HandleMetricReport(
                    deployment_id=self._id,
                    handle_id="ingress",
                    actor_id="ingress",
                    handle_source=DeploymentHandleSource.REPLICA,
                    queued_requests=list(data.get(QUEUED_REQUESTS_KEY, [])),
                    metrics={
                        RUNNING_REQUESTS_KEY: {
                            replica_id.to_full_id_str(): list(data[replica_id])
                            for replica_id in running
                            if replica_id in data
                        }
                    },
                    timestamp=at_s,
                )
            )


class _Clock:
    """In the place of the module `time`, in the two modules that decide."""

    def __init__(self) -> None:
        self.now_s = _EPOCH_S

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    @contextmanager
    def in_ray(self) -> Iterator[None]:
        """Not for threads: whoever else decides in this process meanwhile has this clock, too."""
        modules: tuple[Any, ...] = (autoscaling_state, autoscaling_policy)
        real = [module.time for module in modules]
        for module in modules:
            module.time = self
        try:
            yield
        finally:
            for module, time in zip(modules, real, strict=True):
                module.time = time
