"""``python -m inference.serving MODEL``: an HTTP service over one or several checkpoints.

It speaks the Open Inference Protocol v2. ``POST /predict`` takes an image as the multipart form field ``image`` and
gives the answer that the batch script gives for the same file. ``/`` is a page for people. What is wrong with a request
comes back as one sentence. Options are checked and the port is taken before torch is loaded.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import os
    import re
    import socket
    import ssl
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager, ExitStack
    from dataclasses import dataclass, replace
    from functools import partial
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, Literal

    import click

    from ckpt_tools.arguments import refusing_empty
    from ckpt_tools.errors import CkptError, FormatError, StoreError, UsageError

    from ..common.errors import printable, report_errors
    from ..common.files import check_model
    from ..common.name_options import AS_IT_IS, Reading, reading_options
    from ..common.training_package import commands
    from .listening import (
        GRPC_PORT,
        Listening,
        address_of,
        beside,
        bind,
        check_port,
        is_loopback,
        listen,
        reserve,
        url_of,
    )
    from .settings import Settings, read_token

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from fastapi import FastAPI

    from .processes.remote_models import RemoteModels
    from .processes.worker import Link
    from .repository import Load, Repository, Source

NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=(.+)", re.DOTALL)

DEFAULT_NAME = "model"

Runner = Literal["local", "ray"]
RAY_EXTRA = "ray-serve"

INSTEAD = {
    "--workers": "--replicas says how many processes serve",
    "--watch": "its replicas serve the weights of the start",
    "--drain": "Ray answers the requests that were taken, and then ends",
    "--certfile": "Ray's proxy speaks plain HTTP; put a proxy with TLS before it",
    "--access-log": "Ray keeps a log of its own",
    GRPC_PORT: "Ray's proxy speaks HTTP",
}
"""What to do without an option on Ray, or why."""


@dataclass(frozen=True, slots=True)
class Options:
    """All that the command line says beside the address. ``models`` are ``URL`` or ``NAME=URL``."""

    models: Sequence[str]
    settings: Settings
    watch: float | None = None
    architecture: str | None = None
    reading: Reading = AS_IT_IS
    threads: int | None = None
    certificate: Path | None = None
    key: Path | None = None
    device: str | None = None
    workers: int = 1
    runner: Runner = "local"
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("there is no model to serve; name one, as MODEL or by --model NAME=URL")
        if self.watch is not None and not self.watch > 0:
            raise UsageError(f"--watch is a number of seconds above 0, not {self.watch:g}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is a number from 1, not {self.threads}")
        if self.workers < 1:
            raise UsageError(f"--workers is a number from 1, not {self.workers}")
        if self.key is not None and self.certificate is None:
            raise UsageError("--keyfile needs --certfile")
        self._check_replicas()
        if self.runner == "ray":
            self._check_ray()

    def _check_replicas(self) -> None:
        scaled = self.min_replicas is not None or self.max_replicas is not None
        if self.runner == "local" and (scaled or self.replicas is not None):
            raise UsageError("--replicas, --min-replicas and --max-replicas are for --runner ray")
        if scaled and self.replicas is not None:
            raise UsageError("--replicas is a fixed number; --min-replicas and --max-replicas are for one that changes")
        if (self.min_replicas is not None) > (self.max_replicas is not None):
            raise UsageError("--min-replicas needs --max-replicas")
        if not 1 <= self.least_replicas <= self.most_replicas:
            raise UsageError("there has to be at least one replica, and --max-replicas may not be below --min-replicas")

    def _check_ray(self) -> None:
        """What a service has in its own process, and replicas have not."""
        given = {
            "--workers": self.workers > 1,
            "--watch": self.watch is not None,
            "--drain": self.settings.drain > 0,
            "--certfile": self.certificate is not None,
            "--access-log": self.settings.has_access_log,
        }
        for option, is_given in given.items():
            if is_given:
                raise UsageError(f"{option} does not go with --runner ray: {INSTEAD[option]}")

    @property
    def least_replicas(self) -> int:
        given = self.replicas if self.max_replicas is None else self.min_replicas
        return 1 if given is None else given

    @property
    def most_replicas(self) -> int:
        return self.least_replicas if self.max_replicas is None else self.max_replicas

    def named(self) -> list[tuple[str, str]]:
        """Each model's name and URL. A path with ``=`` in it that exists is a path."""
        return [_named(text) for text in self.models]

    def sources(self) -> list[Source]:
        from .repository import Source

        return [Source(name, url) for name, url in self.named()]


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if equals and not (name and url) and not Path(text).exists():
        raise UsageError(f"--model {text} has an empty {'URL' if name else 'NAME'}; it is NAME=URL")
    match = None if Path(text).exists() else NAMED.fullmatch(text)
    return (match[1], match[2]) if match else (DEFAULT_NAME, text)


@refusing_empty
def create_app(model: str | Path) -> FastAPI:
    """The application over a checkpoint, which is loaded here: a bad one stops the start, not the first request."""
    return application(Options([str(model)], Settings()))


def application(options: Options, load: Load | None = None, grpc: Listening | None = None) -> FastAPI:
    """The application over models. ``load`` loads them, into this process if it is left out. ``grpc`` is served while
    the application runs."""
    from .http import app
    from .repository import Repository

    repository = Repository(options.sources(), load or _loader(options))
    watching = _watching(repository, options.watch)
    repository.load_all()
    return app.create_app(repository, options.settings, beside=watching, grpc=grpc)


def _loader(options: Options) -> Load:
    from ..models.predictor import load_predictor

    device = _device(options.device, 0)
    chosen = {"architecture": options.architecture, "device": device, **options.reading.given()}
    return lambda url, name: load_predictor(url, name=name, **chosen)


def _device(text: str | None, worker: int) -> torch.device:
    """Of several workers that are to use the GPU, each takes one of its own as long as there are enough."""
    import torch

    try:
        found = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {text} is not a device of torch") from error
    is_any_gpu = str(found) == "cuda" and torch.cuda.is_available()
    return torch.device("cuda", worker % torch.cuda.device_count()) if is_any_gpu else found


def _watching(repository: Repository, seconds: float | None) -> AbstractContextManager[object] | None:
    """Made before the models are loaded: what it sees then is what is loaded."""
    from .watching import Watcher

    return None if seconds is None else Watcher(repository, seconds, tell)


def tell(sentence: str) -> None:
    """One line for the operator."""
    click.echo(printable(sentence), err=True)


def _num_threads(options: Options) -> int:
    """Of a forward pass. By default one processor is left to whatever else there is to do, and of several workers each
    has its share.

    The threads of a forward pass wait for each other by spinning. If one of them has to give way to the threads that
    read requests, the others burn what those need: a forward pass then takes many times as long.
    """
    return options.threads or max(1, len(os.sched_getaffinity(0)) // options.workers - 1)


@dataclass(slots=True)
class _Ended:
    """The end of the process of the models, which may come before there is anybody to tell."""

    error: CkptError | None = None
    tell: Callable[[CkptError], None] | None = None

    def __call__(self, error: CkptError) -> None:
        self.error = error
        self.pass_on()

    def pass_on(self, tell: Callable[[CkptError], None] | None = None) -> None:
        self.tell = tell or self.tell
        if self.tell and self.error:
            self.tell(self.error)


def _models(options: Options, ended: _Ended, worker: int = 0) -> AbstractContextManager[RemoteModels]:
    from .processes.remote_models import RemoteModels

    device = str(_device(options.device, worker))
    return RemoteModels.running(options.architecture, options.reading, device, _num_threads(options), ended)


@click.command(cls=commands.Command, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("model", required=False)
@click.option(
    "--model",
    "models",
    metavar="[NAME=]URL",
    multiple=True,
    help="A model to serve, and the name of it; can be given several times. The same name again is a newer version.",
)
@click.option("--architecture", help="The module of the weights: ours, hf, torchvision:NAME, ...")
@reading_options
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=int, default=8000, help="The port to listen on; 0 takes a free one.")
@click.option(GRPC_PORT, type=int, help="Serve the protocol over gRPC too, on this port; 0 takes a free one.")
@click.option(
    "--allow-host",
    "allowed",
    metavar="NAME",
    multiple=True,
    help="A name that requests may call this service by. On loopback, others than localhost are refused.",
)
@click.option("--watch", type=float, metavar="SECONDS", help="Poll for a newer checkpoint every SECONDS, and serve it.")
@click.option("--timeout", type=float, default=30.0, help="The seconds that a request may wait for the model.")
@click.option("--drain", type=float, default=0.0, help="After a signal, serve so many seconds more, as not ready.")
@click.option(
    "--token", type=click.Path(path_type=Path), metavar="FILE", help="A file with the bearer token to ask for."
)
@click.option("--certfile", type=click.Path(path_type=Path), help="The certificate (PEM): serve HTTPS.")
@click.option("--keyfile", type=click.Path(path_type=Path), help="Its key, if it is in a file of its own.")
@click.option("--access-log", is_flag=True, help="Print a line of JSON for each request.")
@click.option("--threads", type=int, help="The threads of a forward pass; default: one less than processors.")
@click.option("--device", metavar="TEXT", help="Of torch, as cuda:1. The first GPU if left out, else the CPU.")
@click.option("--workers", type=int, default=1, help="The processes that serve; with GPUs, each takes another one.")
@click.option(
    "--runner", type=click.Choice(["local", "ray"]), default="local", help="Where: here, or on a Ray cluster."
)
@click.option("--replicas", type=int, help="With --runner ray: the processes that serve; default: 1.")
@click.option("--min-replicas", type=int, help="With --max-replicas, as many as the load wants; default: 1.")
@click.option("--max-replicas", type=int, help="With --runner ray: at most so many replicas.")
def main(
    model: str | None,
    models: tuple[str, ...],
    architecture: str | None,
    host: str,
    port: int,
    grpc_port: int | None,
    allowed: tuple[str, ...],
    watch: float | None,
    timeout: float,
    drain: float,
    token: Path | None,
    certfile: Path | None,
    keyfile: Path | None,
    access_log: bool,
    threads: int | None,
    device: str | None,
    workers: int,
    runner: Runner,
    replicas: int | None,
    min_replicas: int | None,
    max_replicas: int | None,
    **names: Any,
) -> None:
    """Serve MODEL, a checkpoint of any format, local or remote, over HTTP, until SIGTERM, SIGINT or SIGHUP.

    \b
    Exit codes: 1 the models or the workers ended, 2 usage, 3 not found, 4 not readable, or of another model, 5 the
    address cannot be listened on, 7 refused as unsafe, 143, 130 and 129 ended by SIGTERM, SIGINT and SIGHUP.
    """
    with report_errors():
        check_port(port)
        check_port(grpc_port or 0, GRPC_PORT)
        word = None if token is None else read_token(token)
        settings = Settings(timeout=timeout, drain=drain, token=word, has_access_log=access_log)
        named = (*([model] if model else []), *models)
        options = Options(
            named,
            settings,
            watch,
            architecture,
            Reading.taken_from(names),
            threads,
            certfile,
            keyfile,
            device,
            workers,
            runner,
            replicas,
            min_replicas,
            max_replicas,
        )
        check_certificate(options)
        run(options, Address(host, port, grpc_port, allowed))


def check_certificate(options: Options) -> None:
    """Raises ``CkptError`` for files that TLS cannot be served with."""
    if options.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.certificate, options.key)
    except ssl.SSLError as error:
        raise FormatError(f"--certfile and --keyfile are not a certificate and its key ({error.reason})") from error
    except OSError as error:
        raise StoreError(f"--certfile or --keyfile cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and by which names requests may call it. Without a ``grpc_port`` there is no gRPC."""

    host: str
    port: int
    grpc_port: int | None = None
    allowed: Sequence[str] = ()

    def hosts(self, bound: socket.socket) -> frozenset[str] | None:
        """On loopback, no other names than these; elsewhere, requests come by names that nobody here knows."""
        if not is_loopback(bound) and not self.allowed:
            return None
        return frozenset(name.lower() for name in ("localhost", self.host, *self.allowed))


def run(options: Options, address: Address) -> None:
    """Serve until told to stop; the addresses are printed once the service answers, so port 0 is of use."""
    if options.runner == "ray":
        _serve_on_ray(options, address)
        return
    with ExitStack() as stack:
        if options.workers == 1:
            _check_models(options)
        bound = stack.enter_context(
            bind(address.host, address.port) if options.workers == 1 else reserve(address.host, address.port, "--port")
        )
        options = replace(options, settings=replace(options.settings, hosts=address.hosts(bound)))
        grpc = None
        if address.grpc_port is not None:
            reserved = stack.enter_context(reserve(address.host, address.grpc_port))
            grpc = Listening(address_of(reserved), options.certificate, options.key)
        (_serve if options.workers == 1 else _serve_together)(options, address, bound, grpc)


def _serve_on_ray(options: Options, address: Address) -> None:
    if address.grpc_port is not None:
        raise UsageError(f"{GRPC_PORT} does not go with --runner ray: {INSTEAD[GRPC_PORT]}")
    _check_models(options)
    with reserve(address.host, address.port, "--port") as bound:
        url, port, hosts = url_of(bound, address.host), bound.getsockname()[1], address.hosts(bound)
    try:
        from . import ray_serve as ray
    except ModuleNotFoundError as error:
        how = f"install it with: pip install 'ckpt-tools[{RAY_EXTRA}]'"
        raise UsageError(f"--runner ray needs the package {error.name}; {how}") from error

    settings = replace(options.settings, hosts=hosts)
    device = str(_device(options.device, 0)).partition(":")[0]
    model = options.architecture, options.reading, device
    served = ray.Served(tuple(options.sources()), settings, *model, options.threads or 1)
    replicas = ray.Replicas(options.least_replicas, options.most_replicas)
    ray.run(served, replicas, address.host, port, lambda: click.echo(f"serving on {url}"))


def _check_models(options: Options) -> None:
    for _, url in options.named():
        check_model(url)


def _serve(options: Options, address: Address, bound: socket.socket, grpc: Listening | None) -> None:
    ended = _Ended()
    with _models(options, ended) as models:
        from .http.server import serve, server_of

        app = application(options, models.load, grpc)
        listen(bound, address.host)
        server = server_of(
            app,
            lambda: _announce(options, address, bound, grpc),
            drain=options.settings.drain,
            certificate=options.certificate,
            key=options.key,
        )
        ended.pass_on(server.fail)
        serve(server, bound)


def _announce(options: Options, address: Address, bound: socket.socket, grpc: Listening | None) -> None:
    url = url_of(bound, address.host)
    click.echo(f"serving on {url.replace('http', 'https', 1) if options.certificate else url}")
    if grpc is not None:
        click.echo(f"serving gRPC on {grpc.address}")


def _serve_together(options: Options, address: Address, bound: socket.socket, grpc: Listening | None) -> None:
    """Here no model is even checked: access to a store starts threads, and this process has to fork."""
    from .processes.supervisor import Supervisor

    Supervisor(
        partial(_work, options, address, bound, grpc),
        options.workers,
        [name for name, _ in options.named()],
        drain=options.settings.drain,
        announce=lambda: _announce(options, address, bound, grpc),
        tell=tell,
    ).run()


def _work(
    options: Options,
    address: Address,
    reserved: socket.socket,
    grpc: Listening | None,
    worker: int,
    pipe: Connection,
    others: Sequence[Connection],
    wanted: Sequence[bool],
) -> None:
    """In a worker. What stops its start is for the supervisor to say."""
    from .http.server import server_of
    from .processes.messages import Failed, Serving

    for other in others:
        other.close()
    with ExitStack() as stack:
        ended = _Ended()
        try:
            _check_models(options)
            models = stack.enter_context(_models(options, ended, worker))
            app, link = _shared_application(options, models.load, grpc, worker, pipe, wanted)
            bound = beside(reserved)
            listen(bound, address.host)
        except (CkptError, ModuleNotFoundError, OSError) as error:
            pipe.send(Failed(error))
            return
        ended.pass_on(link.fail)
        server = server_of(
            app,
            lambda: link.send(Serving()),
            drain=options.settings.drain,
            certificate=options.certificate,
            key=options.key,
        )
        link.stop = server.stop
        server.run(sockets=[bound])


def _shared_application(
    options: Options, load: Load, grpc: Listening | None, worker: int, pipe: Connection, wanted: Sequence[bool]
) -> tuple[FastAPI, Link]:
    """The application over the models that all workers have, once they have them. The first worker watches."""
    from .http import app
    from .http.middleware import Traffic
    from .processes.worker import Link, SharedRepository

    link, traffic = Link(pipe), Traffic()
    repository = SharedRepository(options.sources(), load, link, traffic, worker)
    link.listen()
    watching = None if worker else _watching(repository, options.watch)
    repository.load_wanted(wanted)
    found = app.create_app(
        repository,
        options.settings,
        beside=watching,
        grpc=grpc,
        traffic=traffic,
        everywhere=repository.everywhere,
    )
    return found, link


if __name__ == "__main__":
    with killed_by_interrupts():
        main()
