"""Asking: attempt keys -> batches -> pictures -> answers -> rows of the log.

Batches are made of the whole list of keys, not of what is still missing, so that a resumed run
asks in the same batches as an uninterrupted one and gets the same rows; a batch is written in one
transaction. What goes wrong with one row (a picture, the model, the judge) is that row's error.

Left out: the choice of what to ask, which is `scoring` (the whole grid), `adaptive` and `trees`,
and who answers, which is `answerers`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tierwise.core.progress import SILENT, Progress
from tierwise.curriculum.answerers import Answerer, LocalAnswerer, Reply, Request
from tierwise.curriculum.difficulty.attempts import Attempt, AttemptKey, AttemptLog, Balance, Probe
from tierwise.curriculum.difficulty.masks import Fill, MaskKind, Pixels, grey_picture, mask_picture
from tierwise.curriculum.difficulty.rscore import Tree
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.samples import BadImageError, Sample, image_digest, load_image
from tierwise.curriculum.verdicts import Judgement, Verdict, judge

if TYPE_CHECKING:
    from PIL import Image

Asked = tuple[list[Attempt], list[Balance]]
"""What asking some keys gave: rows of the log."""

_LEASE_S = 900.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn. Defaults: the paper's released script.

    Attributes:
        temperature: Of the sampled probes; the greedy one has none.
        max_new_tokens: Where an answer is cut, in tokens.
        batch_size: Rows asked together.
    """

    temperature: float = 0.7
    max_new_tokens: int = 1024
    batch_size: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How pictures are masked; see `masks`."""

    kind: MaskKind = MaskKind.PIXEL
    fill: Fill = Fill.BLACK
    patch_side: int = 14


def owner_name() -> str:
    """Return this process's name for claims: machine, process id, and a token against reuse."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def judge_by_kind(sample: Sample, text: str) -> Judgement:
    """Return whether an answer is right by the kind of the sample's gold answer."""
    return judge(sample.answer, text, task=sample.task)


@dataclass(slots=True, kw_only=True)
class Desk:
    """All that asking needs: samples, an answerer, the log, and the settings.

    Attributes:
        samples: By id.
        answerer: Who answers.
        log: Where attempts are kept.
        sampling: How answers are drawn.
        masking: How pictures are masked.
        tree: How reasoning trees are sampled.
        judge: The judgement of an answer to a sample.
        seed: The run's seed.
        progress: Where it says how far it is.
        owner: Name of this process among those that share the log.
        clock: Seconds that all those processes share; for claims alone.
    """

    samples: Mapping[str, Sample]
    answerer: Answerer
    log: AttemptLog
    sampling: Sampling = field(default_factory=Sampling)
    masking: Masking = field(default_factory=Masking)
    tree: Tree = field(default_factory=Tree)
    judge: Callable[[Sample, str], Judgement] = judge_by_kind
    seed: int = 0
    progress: Progress = SILENT
    owner: str = field(default_factory=owner_name)
    clock: Callable[[], float] = time.time
    _hashes: dict[tuple[str, bool, bool, bool], str] = field(default_factory=dict)
    _model: str = ""
    _unreached: set[AttemptKey] | None = None
    _pixels: dict[str, tuple[Pixels, ...]] = field(default_factory=dict)

    def model_hash(self) -> str:
        """Return the answerer's hash, computed once."""
        self._model = self._model or self.answerer.model_hash()
        return self._model

    def key(self, sample_id: str, probe: Probe, *, permille: int = 0, k: int = 0) -> AttemptKey:
        """Return the key of one attempt under this desk's settings."""
        return AttemptKey(
            sample_id=sample_id,
            probe=probe.value,
            mask_permille=permille,
            k=k,
            seed=0 if probe is Probe.GREEDY else self.seed,
            model_hash=self.model_hash(),
            prompt_hash=self.prompt_hash(
                sample_id,
                greedy=probe is Probe.GREEDY,
                masked=permille > 0,
                tree=probe is Probe.TREE,
            ),
        )

    def prompt_hash(self, sample_id: str, *, greedy: bool, masked: bool, tree: bool = False) -> str:
        """Return the hash of all that decides an answer and its verdict beside the rest of its key.

        The right answer is in it: a verdict on what was right before is none on what is right now.
        """
        place = (sample_id, greedy, masked, tree)
        if place not in self._hashes:
            sample = self.samples[sample_id]
            parts = [
                self.answerer.prompt_hash(),
                sample.question,
                sample.answer,
                sample.task,
                *(image_digest(path) for path in sample.images),
                "greedy" if greedy else f"{self.sampling.temperature!r}",
                str(self.sampling.max_new_tokens),
                f"{self.masking}" if masked else "",
            ]
            if tree:
                parts.append(f"{self.tree.branches}|{self.tree.depth}|{self.tree.interval}")
            text = "\x1f".join(parts).encode("utf-8", "surrogatepass")
            self._hashes[place] = hashlib.sha256(text).hexdigest()[:16]
        return self._hashes[place]

    def run(self, keys: Sequence[AttemptKey], *, name: str, balance: bool = False) -> None:
        """Ask whatever of the keys the log does not hold; returns when it holds them all.

        Args:
            keys: What to ask, all of one probe.
            name: What the progress calls it.
            balance: Measure the attention balance too; for greedy keys and a local model.
        """
        self.work(
            keys,
            name=name,
            size=self.sampling.batch_size,
            ask=partial(self.ask, balance=balance),
            balance=balance,
        )

    def work(
        self,
        keys: Sequence[AttemptKey],
        *,
        name: str,
        size: int,
        ask: Callable[[Sequence[AttemptKey]], Asked],
        balance: bool = False,
    ) -> None:
        """Ask, batch by batch, whatever of the keys the log does not hold.

        What no server answered in an earlier run is asked once more.

        Args:
            keys: What to ask.
            name: What the progress calls it.
            size: Keys in a batch.
            ask: Makes the rows of some keys.
            balance: A key is missing while it has no attention balance.
        """
        waiting = [keys[start : start + size] for start in range(0, len(keys), size)]
        self._release_the_dead()
        try:
            with self.progress.task(name, len(keys)) as task:
                while waiting:
                    busy = [batch for batch in waiting if not self._try(batch, ask, balance)]
                    task.advance(sum(map(len, waiting)) - sum(map(len, busy)))
                    waiting = busy
                    if waiting:
                        time.sleep(_POLL_S)
                        self._release_the_dead()
        finally:
            self.log.release(owner=self.owner)

    def _release_the_dead(self) -> None:
        """Give back the claims of processes of this machine that are no longer there."""
        for owner in self.log.owners():
            if not _may_be_alive(owner):
                self.log.release(owner=owner)

    def _try(
        self,
        batch: Sequence[AttemptKey],
        ask: Callable[[Sequence[AttemptKey]], Asked],
        balance: bool,
    ) -> bool:
        """Return whether the log holds the batch now; False while another process works on it."""
        if not self._missing(batch, balance):
            return True
        name = f"{batch[0]}|{batch[-1]}|{len(batch)}|{balance}"
        if not self.log.claim(name, owner=self.owner, now=self.clock(), lease_s=_LEASE_S):
            return False
        attempts, balances = ask(self._missing(batch, balance))
        self.log.add(attempts, balances, batch=name)
        self._asked_again().difference_update(batch)
        return True

    def _missing(self, batch: Sequence[AttemptKey], balance: bool) -> list[AttemptKey]:
        if balance:
            return self.log.missing_balances(batch)
        return self.log.missing(batch, again=self._asked_again())

    def _asked_again(self) -> set[AttemptKey]:
        """Return the keys that no server had answered when this run began, and it has not asked."""
        if self._unreached is None:
            self._unreached = self.log.unreached(model_hash=self.model_hash())
        return self._unreached

    def ask(self, keys: Sequence[AttemptKey], *, balance: bool = False) -> Asked:
        """Return an attempt for each key, judged, and balances; the log is not touched."""
        started = time.monotonic()
        requests: dict[AttemptKey, Request] = {}
        replies: dict[AttemptKey, Reply] = {}
        for key in keys:
            try:
                requests[key] = self.request(key)
            except BadImageError as error:
                replies[key] = Reply(text="", error=error.fault.value)
        for blind in (False, True):
            part = {key: one for key, one in requests.items() if (one.images is None) == blind}
            replies.update(zip(part, self._answers(part, balance), strict=True))
        seconds = (time.monotonic() - started) / max(1, len(keys))
        attempts = [self.judged(key, replies[key], seconds) for key in keys]
        return attempts, [row for key in keys if balance for row in _rows(key, replies[key])]

    def _answers(self, part: Mapping[AttemptKey, Request], balance: bool) -> list[Reply]:
        if not part:
            return []
        greedy = next(iter(part)).probe == Probe.GREEDY.value
        settings = {
            "temperature": 0.0 if greedy else self.sampling.temperature,
            "max_new_tokens": self.sampling.max_new_tokens,
        }
        requests = list(part.values())
        if balance and isinstance(self.answerer, LocalAnswerer):
            return self.answerer.answer(requests, balance=True, **settings)  # type: ignore[arg-type]
        return self.answerer.answer(requests, **settings)  # type: ignore[arg-type]

    def judged(self, key: AttemptKey, reply: Reply, seconds: float) -> Attempt:
        """Return the row of one reply."""
        sample = self.samples[key.sample_id]
        common = {"num_tokens": reply.num_tokens, "finished": reply.finished, "seconds": seconds}
        if reply.error:
            return Attempt(
                key=key,
                text=reply.text,
                extracted="",
                verdict=Verdict.ERROR,
                score=0.0,
                error=reply.error,
                **common,  # type: ignore[arg-type]
            )
        found = self.judge(sample, reply.text)
        return Attempt(
            key=key,
            text=reply.text,
            extracted=found.extracted,
            verdict=found.verdict,
            score=found.score,
            error=found.error,
            **common,  # type: ignore[arg-type]
        )

    def request(self, key: AttemptKey) -> Request:
        """Return the question of a key as it is put.

        Raises:
            BadImageError: One of the sample's pictures cannot be used.
        """
        sample = self.samples[key.sample_id]
        seed = key_seed("answer", key.sample_id, key.probe, key.mask_permille, key.k, self.seed)
        decoded = self._decoded(sample)  # a picture that cannot be read spoils every probe
        if key.probe == Probe.BLIND.value or not sample.images:
            return Request(sample=sample, images=None, seed=seed)
        return Request(sample=sample, images=self._pictures(key, decoded), seed=seed)

    def _pictures(self, key: AttemptKey, decoded: Sequence[Pixels]) -> tuple[Image.Image, ...]:
        from PIL import Image as PIL_Image

        shown = []
        for place, pixels in enumerate(decoded):
            if key.probe == Probe.GREY.value:
                shown.append(grey_picture(pixels))
            elif key.mask_permille:
                seed = mask_seed(
                    key.sample_id, permille=key.mask_permille, k=key.k, seed=self.seed, place=place
                )
                shown.append(
                    mask_picture(
                        pixels,
                        permille=key.mask_permille,
                        seed=seed,
                        kind=self.masking.kind,
                        fill=self.masking.fill,
                        patch_side=self.masking.patch_side,
                    )
                )
            else:
                shown.append(pixels)
        return tuple(PIL_Image.fromarray(pixels) for pixels in shown)

    def _decoded(self, sample: Sample) -> tuple[Pixels, ...]:
        """Return a sample's pictures as arrays, keeping the last few samples' decoded."""
        import numpy as np

        if sample.id not in self._pixels:
            if len(self._pixels) >= 64:
                self._pixels.pop(next(iter(self._pixels)))
            self._pixels[sample.id] = tuple(np.asarray(load_image(path)) for path in sample.images)
        return self._pixels[sample.id]


def _may_be_alive(owner: str) -> bool:
    """Return False only for a process of this machine that is gone."""
    host, _, rest = owner.partition("/")
    process, _, _ = rest.partition("/")
    if host != socket.gethostname() or not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _rows(key: AttemptKey, reply: Reply) -> list[Balance]:
    """Return the balance rows of one greedy answer, one a variant; without any, an error row."""

    def row(variant: str, ratio: float | None, error: str) -> Balance:
        return Balance(
            sample_id=key.sample_id,
            variant=variant,
            model_hash=key.model_hash,
            prompt_hash=key.prompt_hash,
            ratio=ratio,
            num_tokens=reply.num_tokens,
            error=error,
        )

    if reply.ratios is None:
        return [row("sum", None, reply.error or "no_image")]
    return [row(variant, ratio, "") for variant, ratio in reply.ratios.items()]


def mask_seed(sample_id: str, *, permille: int, k: int, seed: int, place: int = 0) -> int:
    """Return the seed of one mask: of the sample, its masked share, k and the run's seed alone.

    Args:
        sample_id: The sample.
        permille: Masked share in 1/1000.
        k: Number of the repetition.
        seed: The run's seed.
        place: Which of the sample's pictures.
    """
    return key_seed("mask", sample_id, permille, k, seed, place)
