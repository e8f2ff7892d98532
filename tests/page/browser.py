"""A headless Chromium and the few commands of its DevTools protocol that a test of a page needs."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 20.0
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
    "--remote-debugging-port=0",
)
_KEYS = {  # code, virtual key, text
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    " ": ("Space", 32, " "),
}
CTRL = 2


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """A browser with an empty profile; gives the address of its DevTools."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        stderr = process.stderr
        try:
            found = (_LISTENING.search(line.decode("utf-8", "replace")) for line in stderr)
            url = next(match[1] for match in found if match)
            drain = threading.Thread(target=lambda: [None for _ in stderr], daemon=True)
            drain.start()
            yield url
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            drain.join()


class Page:
    """One tab in a profile of its own. What its console and its scripts complain of is collected
    in `complaints`."""

    def __init__(self, socket: ClientConnection) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0

    async def call(self, method: str, **params: Any) -> Any:
        self._last_id += 1
        answer = self._answers[self._last_id] = asyncio.get_running_loop().create_future()
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send(json.dumps(message))
        return await asyncio.wait_for(answer, TIMEOUT_S)

    async def open_tab(self) -> None:
        context = await self.call("Target.createBrowserContext")
        target = await self.call(
            "Target.createTarget",
            url="about:blank",
            browserContextId=context["browserContextId"],
            width=1280,
            height=800,
        )
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            await self.call(f"{domain}.enable")

    async def receive(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame)
            answer = self._answers.pop(message.get("id"), None)
            if answer is None:
                self._note(message)
            elif "error" in message:
                answer.set_exception(RuntimeError(message["error"]["message"]))
            else:
                answer.set_result(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", details).get("description", ""))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.complaints.append(str([arg.get("value") for arg in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])

    async def before_load(self, script: str) -> None:
        """Run `script` in every document before its own."""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    async def press(self, key: str, modifiers: int = 0) -> None:
        code, number, text = _KEYS[key]
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        kind = "keyDown" if text and not modifiers else "rawKeyDown"
        text_field = {"text": text} if kind == "keyDown" else {}
        await self.call("Input.dispatchKeyEvent", type=kind, **common, **text_field)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def choose_file(self, selector: str, path: Path) -> None:
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = await self.call("DOM.querySelector", nodeId=root, selector=selector)
        await self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node["nodeId"])


@contextlib.asynccontextmanager
async def tab(devtools_url: str) -> AsyncIterator[Page]:
    async with ws_connect(devtools_url, max_size=None, proxy=None) as socket:
        page = Page(socket)
        receiving = asyncio.create_task(page.receive())
        try:
            await page.open_tab()
            yield page
            await page.call("Page.close")
        finally:
            receiving.cancel()
            await asyncio.wait((receiving,))
