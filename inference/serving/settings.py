"""Settings and limits of the service, and its listening sockets, ports and URLs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UsageError

MAX_UPLOAD_BYTES = 16 * 2**20

# What a multipart form takes around one file: its boundaries, headers and the file's name.
MAX_BODY_BYTES = MAX_UPLOAD_BYTES + 2**16

MAX_HEAD_BYTES = 2**16  # approximate limit of request line and headers; the connection is closed beyond it
HEAD_SECONDS = 10.0  # timeout for the head of a request; the connection is closed after it
BODY_SECONDS = 30.0  # timeout for head and body of a request; the connection is closed after it
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of the command line. ``timeout`` is the longest wait for the model in seconds, and ``max_queue_delay``
    how long a batch waits to be filled while the model is idle. Without a ``token``, every client is accepted. Raises
    ``UsageError`` for values that do not fit together.

    With ``has_model_control``, clients may load and unload models. With a ``control_token``, these requests need that
    one in the place of ``token``.

    After a signal the service keeps serving for ``drain_seconds`` and reports not ready, so that a load balancer stops
    sending requests.

    ``accepted_hosts`` are names in the Host header, besides IP addresses; None accepts all. Without this check, a page
    in a browser could rebind its own name to this machine and pass as the same origin.
    """

    timeout: float = 30.0
    max_queue_delay: float = 0.0
    body_seconds: float = BODY_SECONDS
    drain_seconds: float = 0.0
    token: str | None = None
    has_model_control: bool = False
    control_token: str | None = None
    has_access_log: bool = False
    accepted_hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.control_token is not None and self.control_token == self.token:
            raise UsageError("--control-token and --token have the same word; leave --control-token out")


def read_token(path: Path, option: str = "--token") -> str:
    """The bearer token in a file, stripped of white space. Raises ``CkptError``."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"{option}: there is no file {path}") from error
    except OSError as error:
        raise StoreError(f"{option}: {path} cannot be read ({error.strerror or error})") from error
    if not token or len(token) > MAX_TOKEN_BYTES or not all(33 <= byte < 127 for byte in token):
        raise FormatError(f"{option}: {path} has to hold one word of ASCII, of at most {MAX_TOKEN_BYTES} bytes")
    return token.decode()


def bind_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises ``StoreError``, which names the address. Each answer is sent
    at once: an accepted connection inherits TCP_NODELAY on Linux. Without it the last packet of an answer on a
    kept-alive connection waits for the client's delayed acknowledgement, 40 ms."""
    family, kind, protocol, address = _resolve_host(host, port)
    bound_socket = socket.socket(family, kind, protocol)
    try:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound_socket.bind(address)
    except OSError as error:
        bound_socket.close()
        raise _make_listen_error(host, port, error, option) from error
    return bound_socket


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Address of gRPC, whose port :func:`reserve_port` keeps, and the TLS files. ``certificate`` may have the key."""

    address: str
    certificate: Path | None = None
    key: Path | None = None


def reserve_port(host: str, port: int, option: str = "--grpc-port") -> socket.socket:
    """A bound socket that never listens and keeps its port for a server that binds its own: gRPC, or Ray's proxy.
    The port is exclusive at first, then shared with this user's processes (SO_REUSEPORT). Raises as
    :func:`bind_socket`."""
    bound_socket = bind_socket(host, port, option)
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return bound_socket


def format_address(bound_socket: socket.socket) -> str:
    """``HOST:PORT`` of a bound socket."""
    host, port = bound_socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(bound_socket: socket.socket) -> bool:
    return ip_address(bound_socket.getsockname()[0].partition("%")[0]).is_loopback


def start_listening(bound_socket: socket.socket, host: str) -> str:
    """Listen; returns the URL of the service. Raises ``StoreError``."""
    try:
        bound_socket.listen()
    except OSError as error:
        raise _make_listen_error(host, bound_socket.getsockname()[1], error) from error
    return format_url(bound_socket, host)


def format_url(bound_socket: socket.socket, host: str) -> str:
    port = bound_socket.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve_host(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, tuple[object, ...]]:
    """The first address of a host, preferably IPv4: the service has one socket, and most clients try IPv4."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"the host {host} cannot be found ({reason}); --host takes an address of this machine"
        ) from error
    family, kind, protocol, _, address = min(candidates, key=lambda each: each[0] != socket.AF_INET)
    return family, kind, protocol, address


def _make_listen_error(host: str, port: int, error: OSError, option: str = "--port") -> StoreError:
    return StoreError(
        f"cannot listen on host {host}, port {port}: {error.strerror or error}; try another {option} or --host"
    )
