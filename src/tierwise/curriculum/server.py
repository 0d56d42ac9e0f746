"""A pool of OpenAI-compatible servers as an `Answerer`: how one scales past one machine.

Speaks `POST BASE/chat/completions` with pictures as PNG data URLs, as vLLM, SGLang and llama.cpp
serve it. Requests go to the endpoints in turn, a bounded number at once; a failed one is tried
again, at the next endpoint, after a growing pause. What still fails is that row's error and has a
class; it is never a wrong answer. Left out: streaming, and attention, which no server returns.

Source: OpenAI API reference, "Create chat completion",
https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import math
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tierwise.core.errors import UsageError
from tierwise.curriculum.answerers import Reply, Request
from tierwise.curriculum.models import PromptTemplate
from tierwise.curriculum.samples import IMAGE_TAG

if TYPE_CHECKING:
    from PIL import Image


class ServerFault(StrEnum):
    """Why a server gave no answer; `server_400` and the like carry the status."""

    UNREACHABLE = "server_unreachable"
    TIMEOUT = "server_timeout"
    BAD_JSON = "server_bad_json"
    OTHER_MODEL = "server_other_model"


class _Refused(Exception):
    """One try that gave no answer, by its class; some are worth another try."""

    def __init__(self, fault: str, *, again: bool) -> None:
        super().__init__(fault)
        self.fault, self.again = fault, again


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How servers are asked; the batch size bounds the requests in flight too.

    Attributes:
        per_endpoint: Requests in flight at one endpoint.
        timeout_s: For one try, in seconds.
        retries: Further tries after the first, each at the next endpoint.
    """

    per_endpoint: int = 8
    timeout_s: float = 600.0
    retries: int = 3


@dataclass(slots=True, kw_only=True)
class ServerPool:
    """Servers that all serve one model.

    Attributes:
        endpoints: Base URLs, such as "http://host:8000/v1".
        model: The model's name as the servers know it; an answer under another name is an error.
        template: What is put around each question.
        api_key: Sent as a bearer token unless "".
        per_endpoint: Requests in flight at one endpoint.
        timeout_s: For one try, in seconds.
        retries: Further tries after the first.
        pause_s: Before the first further try, in seconds; doubled each time.
        sleep: What pauses.
    """

    endpoints: tuple[str, ...]
    model: str
    template: PromptTemplate = field(default_factory=PromptTemplate)
    api_key: str = field(default="", repr=False)
    per_endpoint: int = 8
    timeout_s: float = 600.0
    retries: int = 3
    pause_s: float = 0.5
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuse a pool that cannot answer."""
        if not self.endpoints or self.per_endpoint < 1 or self.retries < 0:
            raise UsageError(
                "a pool needs an endpoint, a request in flight and no negative retries"
            )
        if not 0 < self.timeout_s < math.inf:
            raise UsageError("a pool needs a timeout of more than 0 seconds")
        for endpoint in self.endpoints:
            if not endpoint.startswith(("http://", "https://")):
                raise UsageError(f"{endpoint!r} is no http address")

    def model_hash(self) -> str:
        """Return what identifies the model: its name, since a server does not show its weights."""
        return "server:" + hashlib.sha256(self.model.encode()).hexdigest()[:16]

    def prompt_hash(self) -> str:
        """Return what identifies the prompt: the template; the chat template is the server's."""
        text = f"{self.template.system}\x1f{self.template.suffix}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        """Return one reply a request, in order; many are in flight at once."""
        bodies = [self._body(request, temperature, max_new_tokens) for request in requests]
        workers = min(len(requests), self.per_endpoint * len(self.endpoints)) or 1
        return _in_threads(self._reply, bodies, workers)

    def _body(self, request: Request, temperature: float, max_new_tokens: int) -> bytes:
        messages: list[dict[str, Any]] = []
        if self.template.system:
            messages.append({"role": "system", "content": self.template.system})
        messages.append({"role": "user", "content": _content(request, suffix=self.template.suffix)})
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "seed": request.seed % 2**31,
        }
        return json.dumps(body).encode()

    def _reply(self, number: int, body: bytes) -> Reply:
        fault = ""
        for attempt in range(self.retries + 1):
            if attempt:
                self.sleep(self.pause_s * 2 ** (attempt - 1))
            endpoint = self.endpoints[(number + attempt) % len(self.endpoints)]
            try:
                return self._ask(endpoint, body)
            except _Refused as refused:
                fault = refused.fault
                if not refused.again:
                    break
        return Reply(text="", error=fault)

    def _ask(self, endpoint: str, body: bytes) -> Reply:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = endpoint.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as response:
                payload = response.read()
        except urllib.error.HTTPError as error:
            with error:
                again = error.code >= 500 or error.code in (408, 429)
                raise _Refused(f"server_{error.code}", again=again) from error
        except TimeoutError as error:
            raise _Refused(ServerFault.TIMEOUT, again=True) from error
        except urllib.error.URLError as error:
            timed_out = isinstance(error.reason, TimeoutError)
            fault = ServerFault.TIMEOUT if timed_out else ServerFault.UNREACHABLE
            raise _Refused(fault, again=True) from error
        except (OSError, http.client.HTTPException) as error:
            fault = (
                ServerFault.BAD_JSON
                if isinstance(error, http.client.IncompleteRead)
                else ServerFault.UNREACHABLE
            )
            raise _Refused(fault, again=True) from error
        return self._read(payload)

    def _read(self, payload: bytes) -> Reply:
        try:
            row = json.loads(payload)
            choice = row["choices"][0]
            text = choice["message"]["content"]
            name = row.get("model", self.model)
            num_tokens = int((row.get("usage") or {}).get("completion_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Refused(ServerFault.BAD_JSON, again=True) from error
        if name != self.model:
            raise _Refused(ServerFault.OTHER_MODEL, again=True)
        if not isinstance(text, str):
            raise _Refused(ServerFault.BAD_JSON, again=True)
        return Reply(
            text=text.strip(),
            num_tokens=num_tokens,
            finished=choice.get("finish_reason") != "length",
        )


def _in_threads(
    reply: Callable[[int, bytes], Reply], bodies: Sequence[bytes], num_threads: int
) -> list[Reply]:
    """Return the reply to each body; Ctrl-C leaves requests in flight behind.

    A thread pool would wait for them, and the process for the pool: a server that hangs would
    then keep an interrupted run for its whole timeout, and once more for every further try.
    """
    numbers, ended = queue.SimpleQueue[int](), threading.Event()
    made: dict[int, Reply] = {}
    raised: list[BaseException] = []
    for number in range(len(bodies)):
        numbers.put(number)

    def work() -> None:
        while not ended.is_set():
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            try:
                made[number] = reply(number, bodies[number])
            except BaseException as error:  # handed to the caller below
                raised.append(error)
                ended.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ended.set()
    if raised:
        raise raised[0]
    return [made[number] for number in range(len(bodies))]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirection for an error: the key would go along, to whatever host is named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _content(request: Request, *, suffix: str) -> list[dict[str, Any]]:
    """Return a user message's parts; pictures stand at the question's tags, else before it."""
    pictures = [_picture(image) for image in request.images or ()]
    question = request.sample.question
    if IMAGE_TAG not in question:
        return [*pictures, {"type": "text", "text": question + suffix}]
    parts: list[dict[str, Any]] = []
    pieces = question.split(IMAGE_TAG)
    for number, piece in enumerate(pieces):
        if number and pictures:
            parts.append(pictures[number - 1])
        text = piece + (suffix if number == len(pieces) - 1 else "")
        if text.strip():
            parts.append({"type": "text", "text": text})
    return parts


def _picture(image: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
