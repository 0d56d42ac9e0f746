"""What scoring costs, and what its shortcuts save, on the tiny model that ships.

Three questions: adaptive PISM against full grids of K = 100 (answers, seconds, strata), with the
grid's own seed, of whose answers it asks the first ones, and with a seed of its own; masked
questions asked in batches against one by one; answers a second of a real local HTTP server against
the number of requests in flight. Attention balance is in bench/attention.py. The adaptive rule's
numbers were chosen on other samples. Run it as `python bench/curriculum.py`.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness import Row, ratio_row, row_of, time_in_turn, write_results
from tierwise.curriculum.answerers import Request
from tierwise.curriculum.difficulty.masks import mask_picture
from tierwise.curriculum.difficulty.probes import Sampling
from tierwise.curriculum.difficulty.scores import Score
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image, read_samples
from tierwise.curriculum.server import ServerPool
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.tiny.tasks import write_dataset

NUM_SAMPLES, DATA_SEED = 100, 41
GRID_SEEDS, OTHER_SEED = (401, 402), 403
DECIDING = tuple(range(0, 700, 100))  # shares beyond cannot change a stratum
SERVER_PAUSE_S = 0.02  # a stand-in for a remote server's latency
SAMPLING = Sampling(batch_size=256, max_new_tokens=8)


def main() -> None:
    """Measure all three, print the rows, and write the result file."""
    model = LocalModel.load(tiny_model_path())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listing = write_dataset(folder / "data", NUM_SAMPLES, DATA_SEED, "held_out")
        samples = read_samples(listing).samples
        rows = [
            *batching(model, samples[:32]),
            *serving(samples[:32]),
            *adaptive(model, samples, folder),
        ]
    config = {
        "samples": NUM_SAMPLES,
        "data_seed": DATA_SEED,
        "grid_attempts": 100,
        "grid_seeds": GRID_SEEDS,
        "other_seed": OTHER_SEED,
        "server_pause_s": SERVER_PAUSE_S,
    }
    print(write_results("curriculum", rows, config=config, packages=("torch", "transformers")))


def adaptive(model: LocalModel, samples: Sequence[Sample], folder: Path) -> list[Row]:
    """Return answers, seconds and agreement of the adaptive mode, the grid of K = 100 beside it.

    Every run has a folder, and so an attempt log, of its own: nothing is shared but the seed.
    """
    plain = ScoreConfig(blind=False, cmab=False, sampling=SAMPLING, permilles=DECIDING)
    grid, few = replace(plain, num_attempts=100), replace(plain, mode="adaptive")
    seconds: dict[str, list[float]] = {"grid": [], "adaptive": []}

    def run(config: ScoreConfig, seed: int, kind: str) -> tuple[Score, ...]:
        start = time.process_time()
        found = score(samples, model, config=config, folder=folder / f"{kind}{seed}", seed=seed)
        seconds[kind].append((time.process_time() - start) / len(samples))
        return found.rows

    grids = [run(grid, seed, "grid") for seed in GRID_SEEDS]
    own = [run(few, seed, "adaptive") for seed in GRID_SEEDS]
    other = run(few, OTHER_SEED, "adaptive")
    third = run(grid, OTHER_SEED, "grid")
    small = [
        score(samples, model, config=plain, folder=folder / f"grid{seed}", seed=seed).rows
        for seed in GRID_SEEDS
    ]
    agreed = [
        place
        for place, (one, two) in enumerate(zip(*grids, strict=True))
        if one.pism_stratum is two.pism_stratum
    ]

    def same(rows: Sequence[Score], whole: Sequence[Score], places: Sequence[int]) -> float:
        hits = [rows[place].pism_stratum is whole[place].pism_stratum for place in places]
        return float(np.mean(hits))

    answers = [float(np.mean([row.num_attempts - 1 for row in rows])) for rows in (*own, other)]
    note = f"of the {len(agreed)} of {len(samples)} samples on which two grids of K = 100 agree"
    every = range(len(samples))
    return [
        row_of("adaptive: answers a sample", answers, unit="answers"),
        row_of("adaptive / full grid of K = 100: answers", [n / 1000 for n in answers],
               unit="ratio", note="the full grid has 1,000 answers a sample"),
        row_of("adaptive: CPU seconds a sample", seconds["adaptive"], unit="s"),
        row_of("K = 100 at the seven deciding shares: CPU seconds a sample", seconds["grid"],
               unit="s", note="700 of the full grid's 1,000 answers"),
        row_of("adaptive, the grid's seed: same stratum",
               [same(*pair, agreed) for pair in zip(own, grids, strict=True)], unit="share",
               note=note),
        row_of("adaptive, the grid's seed: same stratum, all samples",
               [same(*pair, every) for pair in zip(own, grids, strict=True)], unit="share"),
        row_of("adaptive, its own seed: same stratum", [same(other, grids[0], agreed)],
               unit="share", note=note),
        row_of("a third grid of K = 100: same stratum", [same(third, grids[0], agreed)],
               unit="share", note=note),
        row_of("grid of K = 10, the grid's seed: same stratum",
               [same(*pair, agreed) for pair in zip(small, grids, strict=True)], unit="share",
               note=note + "; its answers are the first ones of the grid's"),
    ]  # fmt: skip


def batching(model: LocalModel, samples: Sequence[Sample]) -> list[Row]:
    """Return masked questions answered in one batch against one by one."""
    pixels = [np.asarray(load_image(sample.images[0])) for sample in samples]

    def ask(places: Sequence[int]) -> None:
        images = [
            [Image.fromarray(mask_picture(pixels[place], permille=500, seed=place))]
            for place in places
        ]
        prompts = model.encode([samples[place] for place in places], images)
        model.generate(
            prompts, seeds=list(places), temperature=0.7, max_new_tokens=SAMPLING.max_new_tokens
        )

    def ask_in_turn() -> None:
        for place in range(len(samples)):
            ask([place])

    seconds = time_in_turn(
        {"batch": lambda: ask(range(len(samples))), "alone": ask_in_turn}, num_runs=5
    )
    name = f"{len(samples)} masked questions"
    return [
        row_of(f"{name}, one batch", seconds["batch"], unit="s"),
        row_of(f"{name}, one by one", seconds["alone"], unit="s"),
        ratio_row(f"{name}: one by one / one batch", seconds["alone"], seconds["batch"]),
    ]


class _Fixed(BaseHTTPRequestHandler):
    """A server that answers after a fixed pause, so that only our side is measured."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(SERVER_PAUSE_S)
        row = {"model": "fixed", "choices": [{"message": {"content": "3"}}]}
        payload = json.dumps(row).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class _Ready(ThreadingHTTPServer):
    """Lets many connect at once: beyond its own 5 places a connection waits for a second."""

    request_queue_size = 128


@contextmanager
def _server() -> Iterator[str]:
    server = _Ready(("127.0.0.1", 0), _Fixed)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serving(samples: Sequence[Sample]) -> list[Row]:
    """Return answers a second against requests in flight, of a server with a fixed latency."""
    requests = [
        Request(sample=sample, images=(load_image(sample.images[0]),), seed=number)
        for number, sample in enumerate(samples)
    ]
    with _server() as url:

        def ask(flight: int) -> Callable[[], object]:
            pool = ServerPool(endpoints=(url,), model="fixed", per_endpoint=flight)
            return lambda: pool.answer(requests, temperature=0.7, max_new_tokens=8)

        flights = (1, 2, 4, 8, 16)
        seconds: dict[str, Any] = time_in_turn({str(n): ask(n) for n in flights}, num_runs=5)
    note = f"a server that takes {1000 * SERVER_PAUSE_S:.0f} ms an answer, {len(samples)} requests"
    rows = [
        row_of(
            f"server, {flight} in flight",
            [len(samples) / one for one in seconds[str(flight)]],
            unit="answers/s",
            note=note,
        )
        for flight in flights
    ]
    ratio = ratio_row("server: 1 in flight / 16 in flight", seconds["1"], seconds["16"], note)
    return [*rows, ratio]


if __name__ == "__main__":
    main()
