"""The service on a Ray cluster: Ray Serve's proxy takes requests, and replicas hold the models and answer.

The process of the command loads each model once, to know the digest of its weights, and forgets it. All replicas serve
these weights; one that finds others does not begin. With ``--watch`` this process looks for newer checkpoints, and
deploys the application again with new digests and version numbers: Ray then replaces the replicas one after the other.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from ckpt_tools.errors import FormatError, StoreError
from ckpt_tools.process.signals import block_signals_while_starting, defer_signals

from ..common.training_package import launchers
from ..models.predictor import Predictor, load_with_options
from .repository import MAX_WAITING, READY, ModelRepository, ModelSlot, NamedSource
from .settings import ServiceSettings

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .http.app import Application

APPLICATION = "ckpt-tools"

GRACE_SECONDS = 40.0  # time for a stopping replica to answer its requests before it is killed
CHECK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """Number of replicas: from ``minimum`` to ``maximum``, by load."""

    minimum: int
    maximum: int

    def to_ray_options(self) -> dict[str, Any]:
        if self.minimum == self.maximum:
            return {"num_replicas": self.minimum}
        return {"autoscaling_config": {"min_replicas": self.minimum, "max_replicas": self.maximum}}


@dataclass(frozen=True, slots=True)
class KnownWeights:
    """The weights at a source (with the URL that ``RUN@latest`` meant) and the number of their version."""

    source: NamedSource
    digest: str
    number: int


@dataclass(frozen=True, slots=True)
class ReplicaArguments:
    """Arguments of each replica, sent to its process."""

    sources: tuple[NamedSource, ...]
    settings: ServiceSettings
    num_threads: int
    known_weights: tuple[KnownWeights, ...] = ()

    @property
    def num_gpus(self) -> int:
        import torch

        devices = [source.options.device or ("cuda" if torch.cuda.is_available() else "cpu") for source in self.sources]
        return int(any(device.startswith("cuda") for device in devices))

    def load(self, source: NamedSource) -> Predictor:
        import torch

        torch.set_num_threads(self.num_threads)
        return load_with_options(source.url, source.name, source.options)


class DeployingRepository(ModelRepository):
    """The models in the process of the command: what is known of each, and none of them loaded for long. ``deploy`` is
    called when the models of running replicas have changed."""

    def __init__(self, arguments: ReplicaArguments, deploy: Callable[[ReplicaArguments], None]) -> None:
        super().__init__(arguments.sources, arguments.load)
        self.arguments, self._deploy = arguments, deploy
        self.is_deployed = False
        self._known_weights: dict[ModelSlot, KnownWeights] = {}

    def is_answering(self, slot: ModelSlot) -> bool:
        return slot in self._known_weights

    def serve_predictor(self, slot: ModelSlot, predictor: Predictor) -> None:
        """Take note of the weights. Raises StoreError if replicas with them do not start."""
        old_weights = self._known_weights.get(slot)
        number = 1 + max(
            (each.number for each in self._known_weights.values() if each.source.name == predictor.name), default=0
        )
        source = replace(slot.source, url=predictor.identity.source)
        self._known_weights[slot] = KnownWeights(source, predictor.identity.digest, number)
        try:
            if self.is_deployed:
                self.deploy()
        except StoreError:
            assert old_weights is not None
            self._known_weights[slot] = old_weights
            raise
        slot.files, slot.state, slot.reason = predictor.files, READY, ""

    def deploy(self) -> None:
        """Start replicas with the weights that are known, or replace those that run. Raises StoreError."""
        self._deploy(replace(self.arguments, known_weights=tuple(self._known_weights[slot] for slot in self.slots)))
        self.is_deployed = True


class ReplicaRepository(ModelRepository):
    """Models of a replica: of known digests, which are loaded once."""

    def __init__(self, arguments: ReplicaArguments) -> None:
        super().__init__([each.source for each in arguments.known_weights], arguments.load)
        self._known_weights = arguments.known_weights

    def load_all(self) -> None:
        for slot, known_weights in zip(self.slots, self._known_weights, strict=True):
            predictor = self.read_model(slot)
            if predictor.identity.digest != known_weights.digest:
                raise FormatError(f"{slot.source.url} has other weights on another machine, or was replaced meanwhile")
            self._last_numbers[slot.source.name] = known_weights.number - 1
            self.serve_predictor(slot, predictor)


class RequestIdRemover:
    """Drops the service's ``X-Request-Id``, because Ray's proxy sets one on each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [each for each in message["headers"] if each[0] != b"x-request-id"]}
            await send(message)

        await self.app(scope, receive, send_without_id)


@serve.ingress()
class Replica:
    """A replica; Ray starts it once its application is built."""

    def __init__(self, arguments: ReplicaArguments) -> None:
        self.arguments, self.repository = arguments, ReplicaRepository(arguments)
        self.repository.load_all()

    def __serve_build_asgi_app__(self) -> Application:
        from .http.app import create_app

        app = create_app(self.repository, self.arguments.settings, get_replica_metrics=get_replica_metrics)
        app.http_app = RequestIdRemover(app.http_app)
        return app

    def collect_metrics(self) -> tuple[int, list[Metric]]:
        """The number of this replica, and what it counted."""
        return serve.get_replica_context().rank.rank, self.repository.metrics.collect_families()


async def get_replica_metrics() -> dict[int, list[Metric]]:
    handle = serve.get_deployment_handle(APPLICATION, APPLICATION)
    return dict(await handle.broadcast("collect_metrics").results_async())


def serve_until_signal(
    arguments: ReplicaArguments,
    replica_range: ReplicaRange,
    host: str,
    port: int,
    announce: Callable[[], None],
    make_watcher: Callable[[ModelRepository], AbstractContextManager[object]],
) -> None:
    """Serve until a stop signal. ``make_watcher`` is called before models are loaded, and its result entered once
    replicas run. Raises CkptError if a model cannot be served, or replicas do not start."""
    repository = DeployingRepository(arguments, lambda current: _deploy_replicas(current, replica_range))
    watcher = make_watcher(repository)
    repository.load_all()
    with launchers.cluster(replica_range.maximum * arguments.num_threads):
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            with block_signals_while_starting():
                serve.start(http_options={"host": host, "port": port})
            repository.deploy()
            announce()
            with watcher:
                threading.Event().wait()
        finally:
            # A second signal waits: requests that were taken are being answered.
            with defer_signals():
                _end_replicas()


def _deploy_replicas(arguments: ReplicaArguments, replica_range: ReplicaRange) -> None:
    """Start replicas, or replace the running ones: Ray does that one after the other, each after it has answered."""
    deployment = serve.deployment(
        Replica,
        name=APPLICATION,
        max_ongoing_requests=MAX_WAITING,
        graceful_shutdown_timeout_s=GRACE_SECONDS,
        ray_actor_options={"num_cpus": arguments.num_threads, "num_gpus": arguments.num_gpus},
        **replica_range.to_ray_options(),
    )
    try:
        with block_signals_while_starting():
            serve.run(deployment.bind(arguments), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise StoreError(f"the replicas do not start on this cluster ({str(error).splitlines()[0][:200]})") from error


def _end_replicas() -> None:
    """End the replicas, each after answering its requests, then the proxy. A signal to all processes at once ends Ray's
    too. Its client would wait for them for a minute, and abort."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    end_thread = threading.Thread(target=_end_serve, daemon=True)
    end_thread.start()
    while end_thread.is_alive() and _is_listening(host, int(port)):
        end_thread.join(CHECK_SECONDS)


def _end_serve() -> None:
    with suppress(Exception):
        serve.delete(APPLICATION)
        serve.shutdown()


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=10).close()
    except OSError:
        return False
    return True
