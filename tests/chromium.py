"""A headless Chromium, driven through its debugging pipe: no port, no other library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# Chromium reads from descriptor 3 and writes to descriptor 4.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 9) for end in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str:
    """The path of a Chromium."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here; expected one of {', '.join(NAMES)}")
    return found


class Chromium:
    """A browser with one page.

    Attributes:
        events: what has happened since `open`, as Chromium tells it.
    """

    def __init__(self) -> None:
        path = find_chromium()
        self._folder = tempfile.mkdtemp()
        theirs, ours = os.pipe(), os.pipe()
        ends = theirs[0], ours[1]
        flags = *FLAGS, f"--user-data-dir={self._folder}"
        self._process = subprocess.Popen(
            [sys.executable, "-SEc", START, *map(str, ends), path, *flags],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._in, self._out = os.fdopen(theirs[1], "wb"), os.fdopen(ours[0], "rb")
        self._number, self._session, self._rest = 0, None, b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Shows a page on a screen so wide, "dark" or "light", and waits for it."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self._receive()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def requests(self) -> list[str]:
        """Addresses that were asked for, but for the data in the page itself."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[dict[str, Any]]:
        """Messages of the console, and exceptions."""
        names = (
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
        )
        return [event for event in self.events if event["method"] in names]

    def call(self, method: str, **params: Any) -> Any:
        """The answer to a command of Chromium's protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._in.write(json.dumps(message).encode() + b"\0")
        self._in.flush()
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._out.read1(1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session = None
        self.call("Browser.close")
        self._in.close()
        self._out.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
