"""A road to a server that hands bytes on as they are, until it is told to hand on none."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

BLOCK_BYTES = 64 << 10


@dataclass(slots=True)
class Stalling:
    """Where it listens; ``limit`` is how many bytes of answers it hands on, ``count`` how many it did."""

    port: int
    behind: int
    limit: float = float("inf")
    count: int = 0
    is_stalled: threading.Event = field(default_factory=threading.Event)
    """Set once something was held back."""
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stall(self) -> None:
        """From now on nothing comes through."""
        self.limit = -1

    def serve(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listening.accept()[0]
                server = socket.create_connection(("127.0.0.1", self.behind))
                self.sockets += [client, server]
                for pair, is_answer in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._hand_on, args=(*pair, is_answer), daemon=True).start()

    def _hand_on(self, read: socket.socket, write: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := read.recv(BLOCK_BYTES):
                self.count += len(data) if is_answer else 0
                if self.count > self.limit:
                    self.is_stalled.set()
                    return  # the sockets stay open: nothing more comes, and nobody hangs up
                write.sendall(data)
            write.shutdown(socket.SHUT_WR)


@contextmanager
def stalling(behind: int) -> Iterator[Stalling]:
    """A road to the server of this machine at port ``behind``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = Stalling(listening.getsockname()[1], behind)
        threading.Thread(target=made.serve, args=(listening,), daemon=True).start()
        yield made
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        for each in made.sockets:
            each.close()
