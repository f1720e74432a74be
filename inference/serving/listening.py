"""Listening sockets, ports and URLs of the service."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ckpt_tools.errors import StoreError, UsageError

MAX_PORT = 65535

GRPC_PORT = "--grpc-port"


def check_port(port: int, option: str = "--port") -> None:
    """Raise ``UsageError`` for an invalid port."""
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"{option} is a number from 0 to {MAX_PORT}, not {port}")


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises ``StoreError``, which names the address.

    Each answer is sent at once: an accepted connection inherits TCP_NODELAY on Linux. Without it the last packet of
    an answer on a kept-alive connection waits for the client's delayed acknowledgement, 40 ms.
    """
    family, kind, protocol, address = _resolve(host, port)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refused(host, port, error, option) from error
    return bound


@dataclass(frozen=True, slots=True)
class Listening:
    """Address of gRPC with its port, kept by :func:`reserve`, and the TLS files. ``certificate`` may contain the
    key."""

    address: str
    certificate: Path | None = None
    key: Path | None = None


def reserve(host: str, port: int, option: str = GRPC_PORT) -> socket.socket:
    """A bound socket that never listens and keeps its port for a server that binds its own: gRPC, or Ray's proxy.
    The port is exclusive at first, then shared with this user's processes (SO_REUSEPORT). Raises as :func:`bind`."""
    bound = bind(host, port, option)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return bound


def address_of(bound: socket.socket) -> str:
    """``HOST:PORT`` of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    return ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def listen(bound: socket.socket, host: str) -> str:
    """Listen; returns the URL of the service. Raises ``StoreError``."""
    try:
        bound.listen()
    except OSError as error:
        raise _refused(host, bound.getsockname()[1], error) from error
    return url_of(bound, host)


def url_of(bound: socket.socket, host: str) -> str:
    port = bound.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, tuple[object, ...]]:
    """The first address of a host, preferably IPv4: the service has one socket, and most clients try IPv4."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"the host {host} cannot be found ({reason}); --host takes an address of this machine"
        ) from error
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, kind, protocol, address


def _refused(host: str, port: int, error: OSError, option: str = "--port") -> StoreError:
    return StoreError(
        f"cannot listen on host {host}, port {port}: {error.strerror or error}; try another {option} or --host"
    )
