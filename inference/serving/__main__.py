"""``ckpt-tools serve`` (``python -m inference.serving``): a service over one or several checkpoints.

It speaks the Open Inference Protocol v2 over HTTP and gRPC. ``POST /predict`` takes an image as the multipart form
field ``image`` and gives the answer of the batch command for the same file; ``/`` is a page for browsers. Options are
checked and the port is bound before torch is imported.
"""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import os
    import socket
    import ssl
    from collections.abc import Sequence
    from contextlib import ExitStack, nullcontext
    from dataclasses import dataclass, replace
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, Literal

    import click
    from click.core import ParameterSource

    from ckpt_tools.arguments import api_function
    from ckpt_tools.errors import FormatError, StoreError, UsageError

    from ..common.errors import make_printable, report_errors
    from ..common.training_package import commands
    from ..models.options import MODEL_HEADINGS, ModelOptions, add_reading_options
    from .settings import (
        GrpcSettings,
        ServiceSettings,
        bind_socket,
        format_address,
        format_url,
        is_loopback,
        read_token,
        reserve_port,
        start_listening,
    )

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .repository import LoadModel, ModelRepository, NamedSource
    from .watching import CheckpointWatcher

QUIET_SECONDS = 10.0

MODEL_OPTIONS = ModelOptions(exact="buckets")
"""Of models that have none of their own."""

COUNT, PORT = click.IntRange(1), click.IntRange(0, 65535)
SECONDS, POSITIVE_SECONDS = click.FloatRange(0), click.FloatRange(0, min_open=True)
FILE = click.Path(path_type=Path)

NEEDED_OPTIONS = {
    "quiet_time": "watch",
    "keyfile": "certfile",
    "min_replicas": "max_replicas",
    "control_token": "model_control",
    **dict.fromkeys(("replicas", "max_replicas"), "runner"),
}
"""Options that make sense beside another one alone."""

NOT_ON_RAY = {
    "drain": "Ray answers the requests that were taken, and then ends",
    "certfile": "Ray's proxy speaks plain HTTP; put a proxy with TLS before it",
    "access_log": "Ray keeps a log of its own",
    "model_control": "its replicas all serve the same weights, which --watch replaces",
    "grpc_port": "Ray's proxy speaks HTTP",
}
"""Options refused with ``--runner ray``, and what applies instead."""

SET_VALUES = {"model_control": "explicit", "runner": "ray"}
"""Values of options whose default stands for none."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of the command line."""

    models: Sequence[str]
    settings: ServiceSettings
    models_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    allowed_hosts: Sequence[str] = ()
    watch: float | None = None
    quiet_time: float | None = None
    model_options: ModelOptions = MODEL_OPTIONS
    threads: int | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    runner: Literal["local", "ray"] = "local"
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None

    @property
    def least_replicas(self) -> int:
        return self.min_replicas or self.replicas or 1

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.least_replicas

    def list_sources(self) -> list[NamedSource]:
        """The models, each with its options: those of the command line, unless it has its own."""
        from .sources import parse_source, read_sources

        in_file = read_sources(self.models_file, self.model_options) if self.models_file else []
        return [*(parse_source(text, self.model_options) for text in self.models), *in_file]

    def make_repository(self, load: LoadModel) -> ModelRepository:
        """The models, none of which is loaded yet. ``load`` loads one."""
        from .repository import ModelRepository

        return ModelRepository(self.list_sources(), load, max_delay=self.settings.max_queue_delay)

    def make_watcher(self, repository: ModelRepository) -> CheckpointWatcher | None:
        """The watcher of ``--watch``, for models that are not loaded yet."""
        from .watching import CheckpointWatcher

        quiet_time = QUIET_SECONDS if self.quiet_time is None else self.quiet_time
        return None if self.watch is None else CheckpointWatcher(repository, self.watch, quiet_time, print_notice)

    def list_accepted_hosts(self, bound_socket: socket.socket) -> frozenset[str] | None:
        """Values of the Host header to accept: on loopback only these; elsewhere all (None) unless some are given."""
        if not is_loopback(bound_socket) and not self.allowed_hosts:
            return None
        return frozenset(name.lower() for name in ("localhost", self.host, *self.allowed_hosts))

    @property
    def num_threads(self) -> int:
        """Threads of a forward pass. By default one processor is left for everything else. The threads of a forward
        pass wait for each other by spinning: if one has to give way to the threads that read requests, the others burn
        what those need, and a forward pass takes many times as long."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) - 1)

    def check(self) -> None:
        """Check the certificate and the headers of the models. Raises ``CkptError``."""
        if self.certfile is not None:
            _check_certificate(self.certfile, self.keyfile)
        from ..models.architectures import check_readable

        for source in self.list_sources():
            check_readable(source.url, source.options.architecture, source.options.reading.config)


def check_combination(context: click.Context) -> None:
    """Raises ``UsageError`` for options of the command line that do not fit together."""
    options = context.params
    is_given = {
        name: context.get_parameter_source(name) is not ParameterSource.DEFAULT and value == SET_VALUES.get(name, value)
        for name, value in options.items()
    }
    for name, needed in NEEDED_OPTIONS.items():
        if is_given[name] and not is_given[needed]:
            raise UsageError(f"{_spell(name)} needs {_spell(needed)} {SET_VALUES.get(needed, '')}".rstrip())
    for name, instead in NOT_ON_RAY.items():
        if is_given["runner"] and is_given[name]:
            raise UsageError(f"{_spell(name)} does not go with --runner ray: {instead}")
    if is_given["replicas"] and is_given["max_replicas"]:
        raise UsageError("--replicas is a fixed number; --min-replicas and --max-replicas are for one that changes")
    if is_given["max_replicas"] and options["max_replicas"] < (options["min_replicas"] or 1):
        raise UsageError("--max-replicas may not be below --min-replicas")
    if not (options["model"] or options["models"] or options["models_file"]):
        raise UsageError("there is no model to serve; name one, as MODEL or by --model NAME=URL")


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_certificate(certificate: Path, key: Path | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise FormatError(f"--certfile and --keyfile are not a certificate and its key ({error.reason})") from error
    except OSError as error:
        raise StoreError(f"--certfile or --keyfile cannot be read ({error.strerror or error})") from error


@api_function
def create_app(model: str | Path) -> FastAPI:
    """The ASGI application over a checkpoint, loaded into this process now. Raises ``CkptError`` as ``load_model``."""
    from ..models.predictor import load_with_options

    options = ServeOptions([str(model)], ServiceSettings())
    return load_app(
        options, options.make_repository(lambda source: load_with_options(source.url, source.name, source.options))
    )


def load_app(options: ServeOptions, repository: ModelRepository, grpc_settings: GrpcSettings | None = None) -> FastAPI:
    """The application over the models of ``repository``, loaded now, with gRPC beside it if there are settings."""
    from .http import app

    watcher = options.make_watcher(repository)
    repository.load_all()
    return app.create_app(repository, options.settings, background=watcher, grpc_settings=grpc_settings)


def print_notice(sentence: str) -> None:
    click.echo(make_printable(sentence), err=True)


HEADINGS = {
    **MODEL_HEADINGS,
    "Address and access": (
        *("host", "port", "grpc_port", "allowed_hosts", "token", "certfile", "keyfile", "access_log"),
        *("model_control", "control_token"),
    ),
    "Newer checkpoints": ("watch", "quiet_time"),
    "Answers": ("exact", "embeddings", "max_new_tokens", "max_pixels"),
    "Running": (
        *("timeout", "max_batch", "max_queue_delay", "drain", "threads", "device", "dtype"),
        *("runner", "replicas", "min_replicas", "max_replicas", "help"),
    ),
}


@click.command(
    cls=commands.CheckedCommand,
    headings=HEADINGS,
    examples=(
        "ckpt-tools serve model.safetensors --port 8080",
        "ckpt-tools serve --model digits=run@latest --watch 60",
    ),
    context_settings={"show_default": True},
)
@click.argument("model", required=False)
@click.option(
    "--model",
    "models",
    metavar="[NAME=]URL",
    multiple=True,
    help="Model to serve; can be repeated. The same name again is a newer version.",
)
@click.option(
    "--models",
    "models_file",
    type=FILE,
    metavar="FILE",
    help="TOML file with a table for each model: url and options.",
)
@click.option("--architecture", help="Architecture of the weights: ours, hf, torchvision:NAME, ...")
@add_reading_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=PORT, default=8000, help="HTTP port; 0 takes a free one.")
@click.option("--grpc-port", type=PORT, help="Serve gRPC too, on this port; 0 takes a free one.")
@click.option(
    "--allow-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name to accept in requests; can be repeated. On loopback, only localhost is accepted by default.",
)
@click.option(
    "--watch", type=POSITIVE_SECONDS, metavar="SECONDS", help="Check for a newer checkpoint every SECONDS and load it."
)
@click.option(
    "--quiet-time",
    type=SECONDS,
    metavar="SECONDS",
    help="With --watch: load a checkpoint once no file of it has changed for SECONDS.  [default: 10]",
)
@click.option("--timeout", type=POSITIVE_SECONDS, default=30.0, help="Seconds that a request may wait for the model.")
@click.option(
    "--exact",
    type=click.Choice(["buckets", "full", "off"]),
    default="buckets",
    help="Forward passes: of sizes found equal at load, all of the full size, or of any size.",
)
@click.option("--dtype", metavar="TEXT", help="dtype of the parameters, e.g. bfloat16.  [default: the architecture's]")
@click.option("--embeddings", is_flag=True, help="Answer with embeddings: the input of a classifier's last layer.")
@click.option("--max-new-tokens", type=int, metavar="N", help="Most tokens of a continued text.")
@click.option("--max-batch", type=int, metavar="N", help="Most inputs of a forward pass.  [default: 30 or 8]")
@click.option(
    "--max-queue-delay",
    type=SECONDS,
    default=0.0,
    metavar="SECONDS",
    help="Seconds that inputs wait for more while the model is idle.",
)
@click.option("--max-pixels", type=int, help="Largest image, in pixels.  [default: 4096 x 4096, or by the model]")
@click.option("--drain", type=SECONDS, default=0.0, help="Seconds to keep serving after SIGTERM, reporting not ready.")
@click.option("--token", type=FILE, metavar="FILE", help="File with the required bearer token.")
@click.option(
    "--model-control",
    type=click.Choice(["none", "explicit"]),
    default="none",
    help="Whether requests may load and unload models.",
)
@click.option(
    "--control-token",
    type=FILE,
    metavar="FILE",
    help="File with the bearer token of loads and unloads.  [default: that of --token]",
)
@click.option("--certfile", type=FILE, help="TLS certificate (PEM): serve HTTPS.")
@click.option("--keyfile", type=FILE, help="TLS private key, if not in --certfile.")
@click.option("--access-log", is_flag=True, help="Print one line of JSON per request.")
@click.option("--threads", type=COUNT, help="Threads per forward pass.  [default: number of processors - 1]")
@click.option("--device", metavar="TEXT", help="torch device, e.g. cuda:1.  [default: first GPU, else CPU]")
@click.option("--runner", type=click.Choice(["local", "ray"]), default="local", help="Serve here or on Ray Serve.")
@click.option("--replicas", type=COUNT, help="With --runner ray: number of replicas.  [default: 1]")
@click.option("--min-replicas", type=COUNT, help="With --max-replicas: fewest replicas when autoscaling.  [default: 1]")
@click.option("--max-replicas", type=COUNT, help="With --runner ray: most replicas when autoscaling.")
def main(**options: Any) -> None:
    """Serve MODEL, a checkpoint of any format, local or remote, over HTTP and gRPC, until SIGTERM, SIGINT or SIGHUP.

    Exit codes: 1 the models' process ended, 2 usage, 3 not found, 4 not readable, or of another model, 5 the address
    cannot be listened on, 7 refused as unsafe, 143, 130 and 129 ended by SIGTERM, SIGINT and SIGHUP.
    """
    with report_errors():
        check_combination(click.get_current_context())
        token, control_token = options.pop("token"), options.pop("control_token")
        settings = ServiceSettings(
            timeout=options.pop("timeout"),
            max_queue_delay=options.pop("max_queue_delay"),
            drain_seconds=options.pop("drain"),
            token=None if token is None else read_token(token),
            has_model_control=options.pop("model_control") == SET_VALUES["model_control"],
            control_token=None if control_token is None else read_token(control_token, "--control-token"),
            has_access_log=options.pop("access_log"),
        )
        models = (*filter(None, [options.pop("model")]), *options.pop("models"))
        serve_until_signal(ServeOptions(models, settings, model_options=ModelOptions.take_from(options), **options))


def serve_until_signal(options: ServeOptions) -> None:
    """Serve until a signal; the addresses are printed once the service answers, so port 0 is of use."""
    options.check()
    if options.runner == "ray":
        _serve_on_ray(options)
        return
    with ExitStack() as stack:
        bound_socket = stack.enter_context(bind_socket(options.host, options.port))
        grpc_settings = None
        if options.grpc_port is not None:
            reserved_socket = stack.enter_context(reserve_port(options.host, options.grpc_port))
            grpc_settings = GrpcSettings(format_address(reserved_socket), options.certfile, options.keyfile)
        settings = replace(options.settings, accepted_hosts=options.list_accepted_hosts(bound_socket))
        _serve_locally(replace(options, settings=settings), bound_socket, grpc_settings)


def _serve_on_ray(options: ServeOptions) -> None:
    with reserve_port(options.host, options.port, "--port") as bound_socket:
        url, port = format_url(bound_socket, options.host), bound_socket.getsockname()[1]
        settings = replace(options.settings, accepted_hosts=options.list_accepted_hosts(bound_socket))
    try:
        from . import ray_serve
    except ModuleNotFoundError as error:
        how = "install it with: pip install 'ckpt-tools[ray-serve]'"
        raise UsageError(f"--runner ray needs the package {error.name}; {how}") from error
    arguments = ray_serve.ReplicaArguments(tuple(options.list_sources()), settings, options.threads or 1)
    ray_serve.serve_until_signal(
        arguments,
        ray_serve.ReplicaRange(options.least_replicas, options.most_replicas),
        options.host,
        port,
        lambda: click.echo(f"serving on {url}"),
        lambda repository: options.make_watcher(repository) or nullcontext(),
    )


def _serve_locally(options: ServeOptions, bound_socket: socket.socket, grpc_settings: GrpcSettings | None) -> None:
    from .processes.remote_models import RemoteModels

    def announce() -> None:
        url = format_url(bound_socket, options.host)
        click.echo(f"serving on {url.replace('http', 'https', 1) if options.certfile else url}")
        if grpc_settings is not None:
            click.echo(f"serving gRPC on {grpc_settings.address}")

    with RemoteModels.start(options.num_threads, print_notice) as models:
        from .http.server import make_server

        models.repository = options.make_repository(models.load)
        app = load_app(options, models.repository, grpc_settings)
        start_listening(bound_socket, options.host)
        server = make_server(app, announce, options.settings.drain_seconds, options.certfile, options.keyfile)
        server.serve_socket(bound_socket)


if __name__ == "__main__":
    with use_default_interrupt():
        main()
