"""Clients of a service that cost few processor cycles: `python -m benchmarks.load PORT REQUESTS CLIENTS SECONDS`.

Each client sends a whole request over its own connection, waits for the answer, and sends the next one. REQUESTS is a
file with the requests that they take in turn, as :func:`written` writes it. All run in one thread on raw sockets: on a
machine with few processors a client as it is usually written takes more of them than the service that it asks.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

WARM_UP_SECONDS = 1.0
"""Start of a turn, which does not count."""

RECEIVED = 2**16


def request(path: str, body: bytes, content_type: str, **headers: str) -> bytes:
    """A request of HTTP/1.1 whose connection stays open."""
    given = {"Host": "localhost", "Content-Type": content_type, "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def written(requests: Sequence[bytes], path: Path) -> Path:
    path.write_text("\n".join(each.hex() for each in requests))
    return path


@dataclass(slots=True)
class Client:
    """A connection. ``answer`` is the received part of the answer to the request that was sent at ``since``."""

    connection: socket.socket
    turn: int
    since: float = 0.0
    answer: bytes = b""
    ends: int = 0

    def ask(self, requests: Sequence[bytes]) -> None:
        self.turn += 1
        self.since, self.answer, self.ends = time.perf_counter(), b"", 0
        self.connection.sendall(requests[self.turn % len(requests)])

    def take(self) -> bool:
        """Receive a part of the answer; true if that was the last."""
        received = self.connection.recv(RECEIVED)
        if not received:
            raise SystemExit(f"the service closed a connection after {self.answer[:200]!r}")
        self.answer += received
        if not self.ends and (head := self.answer.find(b"\r\n\r\n")) >= 0:
            self.ends = head + 4 + _length(self.answer[:head])
        return bool(self.ends) and len(self.answer) >= self.ends


def _length(head: bytes) -> int:
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the service answered {head.splitlines()[0].decode()}")
    (line,) = [each for each in head.lower().splitlines() if each.startswith(b"content-length:")]
    return int(line.split(b":")[1])


@dataclass(slots=True)
class Load:
    """Seconds of each answer, and the last answer to each request. ``asked`` counts the answers of the warm-up too."""

    seconds: list[float] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    asked: int = 0
    began: float = 0.0
    ended: float = 0.0


def put_on(port: int, requests: Sequence[bytes], num_clients: int, seconds: float) -> Load:
    clients = [Client(socket.create_connection(("127.0.0.1", port)), number) for number in range(num_clients)]
    events, by_number = select.epoll(), {client.connection.fileno(): client for client in clients}
    for client in clients:
        client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        events.register(client.connection, select.EPOLLIN)
        client.ask(requests)
    found = Load(began=time.perf_counter() + WARM_UP_SECONDS)
    while (now := time.perf_counter()) < found.began + seconds:
        for number, _ in events.poll(1):
            client = by_number[number]
            if client.take():
                at = time.perf_counter()
                found.asked += 1
                if at >= found.began:
                    found.seconds.append(at - client.since)
                    found.answers[client.turn % len(requests)] = client.answer.partition(b"\r\n\r\n")[2].hex()
                client.ask(requests)
    found.ended = now
    for client in clients:
        client.connection.close()
    return found


def main(words: Sequence[str]) -> None:
    port, path, num_clients, seconds = words
    requests = [bytes.fromhex(line) for line in Path(path).read_text().splitlines()]
    found = put_on(int(port), requests, int(num_clients), float(seconds))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
