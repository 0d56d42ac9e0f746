"""Who answers: questions as they are put, what comes back, and a local model as one that answers.

The seam between asking (`probes`) and models: anything with the three methods of `Answerer` can be
scored. A batch on which a local model fails is halved until the row that fails stands alone, which
then is that row's error. Left out: servers, which are `server`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierwise.core.errors import TierwiseError
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question as it is put: the sample, its pictures (None: none are shown), a seed."""

    sample: Sample
    images: tuple[Image.Image, ...] | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: a text, or the class of an error; attention balances if measured."""

    text: str
    num_tokens: int = 0
    finished: bool = True
    error: str = ""
    ratios: Mapping[str, float] | None = None


class Answerer(Protocol):
    """Anything that answers questions about pictures: a local model, a pool of servers."""

    def model_hash(self) -> str:
        """Return what identifies the model."""

    def prompt_hash(self) -> str:
        """Return what identifies how a question becomes a prompt."""

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        """Return one reply a request, in order; the requests all show pictures or none does."""


class LocalAnswerer:
    """A local model as an `Answerer`."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model

    def model_hash(self) -> str:
        """Return the hash of the weights."""
        return self.model.model_hash()

    def prompt_hash(self) -> str:
        """Return the hash of the template."""
        return self.model.prompt_hash()

    def answer(
        self,
        requests: Sequence[Request],
        *,
        temperature: float,
        max_new_tokens: int,
        balance: bool = False,
    ) -> list[Reply]:
        """Return one reply a request; a batch that fails is halved until one row fails alone.

        Args:
            requests: All of them show pictures, or none does.
            temperature: 0 is greedy.
            max_new_tokens: Where an answer is cut, in tokens.
            balance: Measure the attention balance of each answer.

        Raises:
            StateError: `balance`, and this model's attention cannot be read.
        """
        try:
            return self._answer(requests, temperature, max_new_tokens, balance)
        except TierwiseError:
            raise
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            if len(requests) == 1:
                return [Reply(text="", error=f"model_failed:{type(error).__name__}")]
        middle = len(requests) // 2
        return [
            reply
            for half in (requests[:middle], requests[middle:])
            for reply in self.answer(
                half, temperature=temperature, max_new_tokens=max_new_tokens, balance=balance
            )
        ]

    def _answer(
        self, requests: Sequence[Request], temperature: float, max_new_tokens: int, balance: bool
    ) -> list[Reply]:
        blind = requests[0].images is None
        samples = [request.sample for request in requests]
        pictures = None if blind else [request.images or () for request in requests]
        prompts = self.model.encode(samples, pictures)
        done = self.model.generate(
            prompts,
            seeds=[request.seed for request in requests],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )
        ratios: Sequence[Mapping[str, float] | None] = [None] * len(requests)
        if balance and not blind:
            from tierwise.curriculum.difficulty.cmab import measure_balance

            found = measure_balance(self.model, samples, prompts, done)
            ratios = [{str(name): value for name, value in one.ratios.items()} for one in found]
        return [
            Reply(text=text, num_tokens=int(length), finished=bool(finished), ratios=ratio)
            for text, length, finished, ratio in zip(
                done.texts, done.lengths_B, done.finished_B, ratios, strict=True
            )
        ]
