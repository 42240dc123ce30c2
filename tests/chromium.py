"""Debian's Chromium without a window, driven by its DevTools protocol over a pipe (https://chromedevtools.github.io)."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"


class Page:
    """A page that is open in it. problems: what the console and the engine complained about."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._buffer, self._id = reader, writer, b"", 0
        self.session, self.problems, self.requests, self.events = "", list[str](), list[str](), list[str]()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30)
            if answer.get("id") == self._id:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._reader], [], [], seconds)[0], "Chromium does not answer"
            self._buffer += os.read(self._reader, 2**20)
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        self.events.append(message.get("method", ""))
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path) -> float:
        """Open a file; return the seconds until it is loaded and drawn."""
        started = time.monotonic()
        self.send("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.events:
            self._next(60)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - started

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value; what it raises is a failure."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def look(self, width: int, height: int, scheme: str = "light", media: str = "") -> None:
        """Set the size of the window, whether it is light or dark, and the medium."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path: Path) -> None:
        """Write what is seen to a PNG file."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def _high(descriptor: int) -> int:
    """Move a descriptor out of the way of those that Chromium reads and writes, 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """Start Chromium with an empty page, and end it."""
    # Its other processes may still write there when the first has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        (from_us, to_it), (from_it, to_us) = (map(_high, os.pipe()) for _ in range(2))
        words = f"exec {CHROMIUM} {_FLAGS} --user-data-dir={profile} --remote-debugging-pipe 3<&{from_us} 4>&{to_us}"
        process = subprocess.Popen(
            ["bash", "-c", words],
            pass_fds=(from_us, to_us),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        opened = Page(from_it, to_it)
        try:
            target = opened.send("Target.createTarget", url="about:blank")["targetId"]
            opened.session = opened.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                opened.send(f"{domain}.enable")
            yield opened
        finally:
            process.terminate()
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.close(from_it)
            os.close(to_it)
