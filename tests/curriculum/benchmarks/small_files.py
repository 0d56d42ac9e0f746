"""Small files in the published layouts (our own pictures and questions), and a judge over HTTP."""

from __future__ import annotations

import base64
import csv
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from tierwise.curriculum.answerers import Reply, Request
from tierwise.curriculum.benchmarks.catalogue import find_benchmark, read_items
from tierwise.curriculum.benchmarks.items import Item, ItemSet
from tierwise.curriculum.server import ServerPool


def png(shade: int = 0) -> bytes:
    """Bytes of a small picture."""
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), (shade % 256, 40, 90)).save(buffer, format="PNG")
    return buffer.getvalue()


def base64_png(shade: int = 0) -> str:
    return base64.b64encode(png(shade)).decode()


def put_picture(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(shade))


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_tsv(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:  # quoted only where needed
        writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def mathvista_row(pid: str, **changes: Any) -> dict[str, Any]:
    """A row of testmini.json; a choice among 3, 5 and 7 whose answer is 5."""
    row = {
        "question": "How many sides has it?",
        "image": f"images/{pid}.jpg",
        "choices": ["3", "5", "7"],
        "unit": None,
        "precision": None,
        "answer": "5",
        "question_type": "multi_choice",
        "answer_type": "text",
        "pid": pid,
        "metadata": {
            "split": "testmini", "language": "english", "img_width": 12, "img_height": 10,
            "source": "Ours", "category": "general-vqa", "task": "figure question answering",
            "context": "geometry diagram", "grade": "elementary school",
            "skills": ["geometry reasoning", "arithmetic reasoning"],
        },
    }  # fmt: skip
    return {**row, **changes}


def hallusion_row(place: str, **changes: Any) -> dict[str, Any]:
    """A row of HallusionBench.json from `CATEGORY_SUB_VISUAL_SET_FIGURE_QUESTION`."""
    category, subcategory, visual, set_id, figure, number = place.split("_")
    row = {
        "category": category, "subcategory": subcategory, "visual_input": visual,
        "set_id": set_id, "figure_id": figure, "sample_note": "", "question_id": number,
        "question": f"Is line {number} longer?", "gt_answer_details": "Line 1 is longer.",
        "gt_answer": "1",
        "filename": None if visual == "0" else f"./{category}/{subcategory}/{set_id}_{figure}.png",
    }  # fmt: skip
    return {**row, **changes}


def write_hallusion(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    for number, row in enumerate(rows):
        if row["filename"]:
            put_picture(folder / "hallusion_bench" / row["filename"], number)
    return write_json(folder / "HallusionBench.json", list(rows))


def read(path: Path, name: str | None = None, **settings: Any) -> ItemSet:
    benchmark, files = find_benchmark(path, name)
    inner = (path if path.is_dir() else path.parent) / "unpacked"
    return read_items(benchmark, path, files, pictures_folder=inner, **settings)


def only(found: ItemSet) -> Item:
    (item,) = found.items
    return item


class Scripted:
    """Answers by sample id; a text that starts with `error:` is an error of that class."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.num_asked = 0

    def model_hash(self) -> str:
        return "scripted"

    def prompt_hash(self) -> str:
        return "scripted"

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        assert temperature == 0.0
        self.num_asked += len(requests)
        replies = []
        for request in requests:
            assert (request.images is None) == (not request.sample.images)
            text = self.texts[request.sample.id]
            _, is_error, fault = text.partition("error:")
            replies.append(Reply(text="", error=fault) if is_error else Reply(text=text))
        return replies


class _Talk(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"][-1]["text"]
        with self.server.lock:
            self.server.prompts.append(text)
            self.server.keys.append(self.headers.get("Authorization"))
        said = self.server.say(text)
        status = said if isinstance(said, int) else 200
        row = {"model": "judge", "choices": [{"message": {"content": str(said)}}]}
        payload = json.dumps(row).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def judging(say: Callable[[str], str | int]) -> Iterator[Any]:
    """A judge on this machine: `say` makes a reply, or an HTTP status, of a prompt."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Talk)
    server.daemon_threads = True
    server.lock, server.prompts, server.keys, server.say = threading.Lock(), [], [], say
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.pool = ServerPool(
        endpoints=(server.url,), model="judge", pause_s=0.001, retries=1, api_key="sk-secret"
    )
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_mathvista(folder: Path, *rows: Mapping[str, Any]) -> Path:
    """Write rows as testmini.json with their pictures; return the folder."""
    for number, row in enumerate(rows):
        put_picture(folder / str(row["image"]), number)
    write_json(folder / "testmini.json", {row["pid"]: row for row in rows})
    return folder
