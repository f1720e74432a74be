"""A real Chromium without a window, driven over its pipe: enough of the DevTools protocol for the page's tests."""

import json
import os
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = "chromium"


@dataclass
class Browser:
    """One tab. Commands are answered in order; events are kept in ``events``."""

    to_it: BinaryIO
    from_it: BinaryIO
    session: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _rest: bytes = b""

    def send(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self.to_it.write(
            json.dumps({**message, **({"sessionId": self.session} if self.session else {})}).encode() + b"\0"
        )
        self.to_it.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self.from_it.fileno(), 2**16)
            assert read, "the browser ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        given = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def wait_for(self, script: str, seconds: float = 120) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return found

    def press(self, key: str, code: int) -> None:
        text = " " if key == " " else ""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def draw(self, *points: tuple[float, float]) -> None:
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def resize(self, width: int, height: int, scheme: str) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Its profile is in ``folder``. It is ended with the block, and all that it started."""
    (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
    # The protocol's pipe is descriptors 3 and 4 of the browser.
    shell = ["bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "chromium", *command]
    with subprocess.Popen(
        shell, pass_fds=(its_in, its_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        os.close(its_in)
        os.close(its_out)
        try:
            with os.fdopen(our_out, "wb") as to_it, os.fdopen(our_in, "rb") as from_it:
                yield Browser(to_it, from_it)
        finally:
            os.killpg(process.pid, 9)
