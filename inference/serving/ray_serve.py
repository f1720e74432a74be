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
from .repository import MAX_WAITING, READY, Repository, Slot, Source
from .settings import Settings

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .http.app import Application

APPLICATION = "ckpt-tools"

GRACE_SECONDS = 40.0  # time for a stopping replica to answer its requests before it is killed
CHECK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Replicas:
    """Number of replicas: from ``least`` to ``most``, by load."""

    least: int
    most: int

    def options(self) -> dict[str, Any]:
        if self.least == self.most:
            return {"num_replicas": self.least}
        return {"autoscaling_config": {"min_replicas": self.least, "max_replicas": self.most}}


@dataclass(frozen=True, slots=True)
class Known:
    """The weights at a source (with the URL that ``RUN@latest`` meant) and the number of their version."""

    source: Source
    digest: str
    number: int


@dataclass(frozen=True, slots=True)
class Served:
    """Arguments of each replica, sent to its process."""

    sources: tuple[Source, ...]
    settings: Settings
    threads: int
    known: tuple[Known, ...] = ()

    @property
    def num_gpus(self) -> int:
        import torch

        devices = [source.options.device or ("cuda" if torch.cuda.is_available() else "cpu") for source in self.sources]
        return int(any(device.startswith("cuda") for device in devices))

    def load(self, source: Source) -> Predictor:
        import torch

        torch.set_num_threads(self.threads)
        return load_with_options(source.url, source.name, source.options)


class KnownModels(Repository):
    """The models in the process of the command: what is known of each, and none of them loaded for long. ``deploy`` is
    called when the models of running replicas have changed."""

    def __init__(self, served: Served, deploy: Callable[[Served], None]) -> None:
        super().__init__(served.sources, served.load)
        self.served, self._deploy = served, deploy
        self.is_deployed = False
        self._known: dict[Slot, Known] = {}

    def is_answering(self, slot: Slot) -> bool:
        return slot in self._known

    def put(self, slot: Slot, predictor: Predictor) -> None:
        """Take note of the weights. Raises StoreError if replicas with them do not start."""
        before = self._known.get(slot)
        number = 1 + max(
            (each.number for each in self._known.values() if each.source.name == predictor.name), default=0
        )
        source = replace(slot.source, url=predictor.identity.source)
        self._known[slot] = Known(source, predictor.identity.digest, number)
        try:
            if self.is_deployed:
                self.deploy()
        except StoreError:
            assert before is not None
            self._known[slot] = before
            raise
        slot.files, slot.state, slot.reason = predictor.files, READY, ""

    def deploy(self) -> None:
        """Start replicas with the weights that are known, or replace those that run. Raises StoreError."""
        self._deploy(replace(self.served, known=tuple(self._known[slot] for slot in self.slots)))
        self.is_deployed = True


class FixedRepository(Repository):
    """Models of a replica: of known digests, which are loaded once."""

    def __init__(self, served: Served) -> None:
        super().__init__([each.source for each in served.known], served.load)
        self._known = served.known

    def load_all(self) -> None:
        for slot, known in zip(self.slots, self._known, strict=True):
            predictor = self.read(slot)
            if predictor.identity.digest != known.digest:
                raise FormatError(f"{slot.source.url} has other weights on another machine, or was replaced meanwhile")
            self._numbers[slot.source.name] = known.number - 1
            self.put(slot, predictor)


class RaysRequestId:
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

    def __init__(self, served: Served) -> None:
        self.served, self.repository = served, FixedRepository(served)
        self.repository.load_all()

    def __serve_build_asgi_app__(self) -> Application:
        from .http.app import create_app

        app = create_app(self.repository, self.served.settings, replicas=metrics_of_replicas)
        app.answer = RaysRequestId(app.answer)
        return app

    def metrics(self) -> tuple[int, list[Metric]]:
        """The number of this replica, and what it counted."""
        return serve.get_replica_context().rank.rank, self.repository.metrics.families()


async def metrics_of_replicas() -> dict[int, list[Metric]]:
    return dict(await serve.get_deployment_handle(APPLICATION, APPLICATION).broadcast("metrics").results_async())


def run(
    served: Served,
    replicas: Replicas,
    host: str,
    port: int,
    announce: Callable[[], None],
    watching: Callable[[Repository], AbstractContextManager[object]],
) -> None:
    """Serve until a stop signal. ``watching`` is called before models are loaded, and entered once replicas run. Raises
    CkptError if a model cannot be served, or replicas do not start."""
    models = KnownModels(served, lambda known: _deploy(known, replicas))
    watcher = watching(models)
    models.load_all()
    with launchers.cluster(replicas.most * served.threads):
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            with block_signals_while_starting():
                serve.start(http_options={"host": host, "port": port})
            models.deploy()
            announce()
            with watcher:
                threading.Event().wait()
        finally:
            # A second signal waits: requests that were taken are being answered.
            with defer_signals():
                _end()


def _deploy(served: Served, replicas: Replicas) -> None:
    """Start replicas, or replace the running ones: Ray does that one after the other, each after it has answered."""
    deployment = serve.deployment(
        Replica,
        name=APPLICATION,
        max_ongoing_requests=MAX_WAITING,
        graceful_shutdown_timeout_s=GRACE_SECONDS,
        ray_actor_options={"num_cpus": served.threads, "num_gpus": served.num_gpus},
        **replicas.options(),
    )
    try:
        with block_signals_while_starting():
            serve.run(deployment.bind(served), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise StoreError(f"the replicas do not start on this cluster ({str(error).splitlines()[0][:200]})") from error


def _end() -> None:
    """End the replicas, each after answering its requests, then the proxy. A signal to all processes at once ends Ray's
    too. Its client would wait for them for a minute, and abort."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    ending = threading.Thread(target=_end_serve, daemon=True)
    ending.start()
    while ending.is_alive() and _is_listening(host, int(port)):
        ending.join(CHECK_SECONDS)


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
