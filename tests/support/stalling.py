"""A road to a server that hands bytes on as they are, until it is told to hand on none."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BLOCK_BYTES = 64 << 10


class Stalling(socketserver.ThreadingTCPServer):
    """``limit`` is how many bytes of answers it hands on, ``count`` how many it did."""

    daemon_threads, block_on_close = True, False
    limit, count = float("inf"), 0

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Road)
        self.behind, self.is_stalled, self.is_over = behind, threading.Event(), threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def stall(self) -> None:
        """From now on nothing comes through."""
        self.limit = -1


class _Road(socketserver.BaseRequestHandler):
    server: Stalling

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.behind)) as behind:
            threading.Thread(target=self._hand_on, args=(self.request, behind, False), daemon=True).start()
            self._hand_on(behind, self.request, True)

    def _hand_on(self, read: socket.socket, write: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := read.recv(BLOCK_BYTES):
                self.server.count += len(data) if is_answer else 0
                if self.server.count > self.server.limit:
                    self.server.is_stalled.set()
                    self.server.is_over.wait()  # the sockets stay open: nothing more comes, and nobody hangs up
                    return
                write.sendall(data)
            write.shutdown(socket.SHUT_WR)


@contextmanager
def stalling(behind: int) -> Iterator[Stalling]:
    """A road to the server of this machine at port ``behind``."""
    with Stalling(behind) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.is_over.set()
        server.shutdown()
