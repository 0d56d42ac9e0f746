from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from tierwise.cli.main import run
from tierwise.core.errors import UsageError
from tierwise.curriculum.answerers import LocalAnswerer, Request
from tierwise.curriculum.difficulty.adaptive import Adaptive
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.probes import Sampling
from tierwise.curriculum.difficulty.scores import Scores
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel, PromptTemplate
from tierwise.curriculum.samples import Sample, SampleSet, load_image
from tierwise.curriculum.server import ServerPool, _content

NO_TEXT = b'{"choices": [{"message": {"content": null}}]}'


class Conversation(BaseHTTPRequestHandler):
    """One request to a real server on this machine; `server.behave` answers it."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            self.server.bodies.append(body)
        self.counted = True
        try:
            self.server.behave(self, body)
        finally:
            self.leave()

    def leave(self) -> None:
        """Stop counting this request: once, and before its answer lets the next one come."""
        if self.counted:
            self.counted = False
            with self.server.lock:
                self.server.now -= 1

    def say(self, text: str, *, model: str = "tiny", status: int = 200) -> None:
        row = {
            "model": model,
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": len(text.split()) + 1},
        }
        self.raw(json.dumps(row).encode(), status=status)

    def raw(self, payload: bytes, *, status: int = 200, length: int | None = None) -> None:
        self.leave()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload) if length is None else length))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def serving(behave: Callable[[Conversation, dict[str, Any]], None]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Conversation)
    server.daemon_threads = True
    server.lock, server.bodies, server.behave = threading.Lock(), [], behave
    server.now = server.most = 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def request(sample: Sample, seed: int = 3) -> Request:
    images = tuple(load_image(path) for path in sample.images)
    return Request(sample=sample, images=images, seed=seed)


def pool(*urls: str, **settings: Any) -> ServerPool:
    return ServerPool(endpoints=urls, model="tiny", pause_s=0.001, **settings)


def ask(one: ServerPool, *requests: Request) -> list[Any]:
    return one.answer(requests, temperature=0.7, max_new_tokens=8)


def test_a_server_on_the_tiny_model_scores_like_the_model_itself(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path
) -> None:
    lock = threading.Lock()

    def behave(talk: Conversation, body: dict[str, Any]) -> None:
        parts = body["messages"][-1]["content"]
        text = next(part["text"] for part in parts if part["type"] == "text")
        pictures = tuple(
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",")[1])))
            for part in parts
            if part["type"] == "image_url"
        )
        sample = Sample(id="x", question=text, answer="1", images=(Path("x.png"),))
        asked = Request(sample=sample, images=pictures or None, seed=body["seed"])
        with lock:
            (reply,) = LocalAnswerer(tiny).answer(
                [asked], temperature=body["temperature"], max_new_tokens=body["max_tokens"]
            )
        talk.say(reply.text)

    class SmallSeeds(LocalAnswerer):
        """The local model, with seeds cut to the 31 bits that servers take."""

        def answer(self, requests: Any, **settings: Any) -> Any:
            cut = [replace(one, seed=one.seed % 2**31) for one in requests]
            return super().answer(cut, **settings)

    config = ScoreConfig(
        num_attempts=1,
        permilles=(0, 500),
        cmab=False,
        sampling=Sampling(batch_size=16, max_new_tokens=8),
    )
    samples = held_out.samples[:16]
    with serving(behave) as first, serving(behave) as second:
        there = score(
            samples, pool(first.url, second.url), config=config, folder=tmp_path / "a", seed=1
        )
        shares = (len(first.bodies), len(second.bodies))
    here = score(samples, SmallSeeds(tiny), config=config, folder=tmp_path / "b", seed=1)
    assert there.rows == here.rows
    assert sum(shares) == 16 * 5
    assert min(shares) > 16  # both endpoints had their part


@pytest.mark.parametrize(
    ("behave", "fault"),
    [
        (lambda talk, _: talk.say("1", status=500), "server_500"),
        (lambda talk, _: talk.say("1", status=400), "server_400"),
        (lambda talk, _: talk.say("1", model="another"), "server_other_model"),
        (lambda talk, _: talk.raw(b'{"choices": [{"mess'), "server_bad_json"),
        (lambda talk, _: talk.raw(b'{"choices": [{"mess', length=1000), "server_bad_json"),
        (lambda talk, _: talk.raw(b'{"choices": []}'), "server_bad_json"),
        (lambda talk, _: talk.raw(NO_TEXT), "server_bad_json"),
        (lambda talk, _: time.sleep(1.0), "server_timeout"),
        (lambda talk, _: talk.wfile.close(), "server_unreachable"),
    ],
)  # fmt: skip
def test_what_a_server_does_wrong_is_an_error_with_its_class(
    plain_sample: Sample, tmp_path: Path, behave: Any, fault: str
) -> None:
    config = ScoreConfig(num_attempts=1, permilles=(0,), blind=False, cmab=False)
    with serving(behave) as server:
        found = score(
            [plain_sample],
            pool(server.url, timeout_s=0.2, retries=1),
            config=config,
            folder=tmp_path,
            seed=0,
        )
        num_tries = len(server.bodies)
    (row,) = found.rows
    assert (row.error, row.pism_stratum, row.num_errors) == (fault, Stratum.ERROR, 2)
    assert num_tries == (2 if fault == "server_400" else 4)  # a 400 is not worth another try


@pytest.mark.parametrize("mode", ["grid", "adaptive"])
def test_what_a_server_failed_at_is_asked_again_when_the_run_goes_on(
    plain_sample: Sample, tmp_path: Path, mode: Literal["grid", "adaptive"]
) -> None:
    """A server that was down for an hour must not cost the samples of that hour."""
    samples = [plain_sample, replace(plain_sample, id="other")]
    config = ScoreConfig(
        num_attempts=3,
        permilles=(0, 500),
        mode=mode,
        adaptive=Adaptive(num_attempts=6, step=2),
        cmab=False,
        sampling=Sampling(batch_size=4),
    )

    def run(folder: str, *, down: bool) -> tuple[Scores, Counter[int]]:
        asked: Counter[int] = Counter()

        def behave(talk: Conversation, body: dict[str, Any]) -> None:
            asked[body["seed"]] += 1
            if down and body["seed"] % 3:
                talk.say("", status=500)
            else:
                talk.say(str(body["seed"] % 2))

        with serving(behave) as server:
            one = pool(server.url, retries=0)
            found = score(samples, one, config=config, folder=tmp_path / folder, seed=0)
        return found, asked

    whole, _ = run("whole", down=False)
    broken, first = run("broken", down=True)
    assert 0 < broken.spent["errors"] < broken.spent["attempts"]
    mended, second = run("broken", down=False)
    assert [row.num_errors for row in mended.rows] == [0, 0]
    assert not {seed for seed in first if seed % 3 == 0} & set(second)  # paid for once
    assert max(second.values()) == 1
    if mode == "grid":
        assert mended.rows == whole.rows


def test_no_server_at_all_is_an_error_too(plain_sample: Sample) -> None:
    with serving(lambda talk, _: None) as server:
        url = server.url
    (reply,) = ask(pool(url, retries=1), request(plain_sample))
    assert reply.error == "server_unreachable"


def test_a_failed_request_is_tried_again_elsewhere_with_growing_pauses(
    plain_sample: Sample,
) -> None:
    pauses: list[float] = []
    with (
        serving(lambda talk, _: talk.say("", status=503)) as broken,
        serving(lambda talk, _: talk.say("7")) as sound,
    ):
        one = pool(broken.url, broken.url, broken.url, sound.url, sleep=pauses.append)
        (reply,) = ask(one, request(plain_sample))
    assert (reply.text, reply.error, len(broken.bodies)) == ("7", "", 3)
    assert pauses == [0.001, 0.002, 0.004]


def test_requests_in_flight_are_bounded_and_many(plain_sample: Sample) -> None:
    def slow(talk: Conversation, _: dict[str, Any]) -> None:
        time.sleep(0.05)
        talk.say("1")

    with serving(slow) as server:
        replies = ask(pool(server.url, per_endpoint=4), *[request(plain_sample)] * 24)
        assert [reply.text for reply in replies] == ["1"] * 24
        assert 2 <= server.most <= 4


def test_what_is_sent(plain_sample: Sample) -> None:
    tagged = replace(plain_sample, question="left <image> right")
    parts = _content(request(tagged), suffix=" !")
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    assert parts[2]["text"] == " right !"
    template = PromptTemplate(system="be brief", suffix=" now")
    with serving(lambda talk, _: talk.say("1")) as server:
        ask(pool(server.url, template=template), request(plain_sample, seed=key_seed("x")))
        (body,) = server.bodies
    assert Counter(message["role"] for message in body["messages"]) == {"system": 1, "user": 1}
    assert body["messages"][1]["content"][-1] == {"type": "text", "text": "is it white ? now"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.7, 8)
    assert 0 <= body["seed"] < 2**31


def test_a_pool_that_cannot_answer_is_refused() -> None:
    with pytest.raises(UsageError, match="no http address"):
        pool("host:8000")
    with pytest.raises(UsageError, match="needs an endpoint"):
        pool()
    with pytest.raises(UsageError, match="needs a timeout"):
        pool("http://host:8000", timeout_s=0.0)


def test_the_command_line_says_how_many_are_in_flight_and_how_long_to_wait(
    plain_sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "is it white ?", "answer": "1", "images": [str(plain_sample.images[0])]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = ["cmab=false", "blind=false", "permilles=[0]", "num_attempts=8",
                "server.per_endpoint=2", "server.timeout_s=0.3", "server.retries=0"]  # fmt: skip
    command = ["curriculum", "score", str(tmp_path / "rows.jsonl"), "--model", "tiny", "--json"]
    command += [part for one in settings for part in ("--set", one)]

    def behave(talk: Conversation, body: dict[str, Any]) -> None:
        if body["temperature"] == 0:
            talk.leave()  # nobody waits for it any more when the others are asked
            time.sleep(1.0)
        else:
            time.sleep(0.02)
            talk.say("1")

    with serving(behave) as server:
        assert run([*command, "--server", server.url, "--out", str(tmp_path / "scores")]) == 0
        assert server.most <= 2
        assert len(server.bodies) == 9
    result = json.loads(capsys.readouterr().out)
    assert (result["errors"], result["commonest_error"]) == (1, "server_timeout")


PROGRAM = """
import sys
from pathlib import Path
from tierwise.curriculum.answerers import Request
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.server import ServerPool
asked = Request(sample=Sample(id="x", question="q", answer="1"), images=(), seed=1)
print("asking", flush=True)
ServerPool(endpoints=(sys.argv[1],), model="tiny").answer(
    [asked] * 3, temperature=0.0, max_new_tokens=8
)
"""


def test_an_interrupted_process_does_not_wait_for_a_server_that_hangs() -> None:
    asked, let_go = threading.Event(), threading.Event()

    def behave(talk: Conversation, body: dict[str, Any]) -> None:
        asked.set()
        let_go.wait(120)

    with serving(behave) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.url], stderr=subprocess.PIPE, text=True
        )
        try:
            assert asked.wait(90)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
            let_go.set()
    assert "KeyboardInterrupt" in said
    assert process.returncode != 0


def test_a_redirection_is_an_error_for_the_key_would_go_along(held_out: SampleSet) -> None:
    with serving(lambda talk, body: talk.say("5")) as other:

        def away(talk: Conversation, body: dict[str, Any]) -> None:
            talk.leave()
            talk.send_response(302)
            talk.send_header("Location", other.url)
            talk.end_headers()

        with serving(away) as server:
            (reply,) = ask(pool(server.url, api_key="secret"), request(held_out.samples[0]))
    assert reply.error == "server_302"
