"""A vision-language model that answers: encode, generate with one seed a row, and its hashes.

Works on any image-text-to-text model of transformers that has a chat template, from a local
folder or a hub id. Every random number of a row depends on that row's seed and on the step alone,
never on its neighbours in the batch (`keyed`). Left out: top-p, top-k and repetition penalties (a
model's own generation settings are not used, so that temperature means one thing everywhere),
beams, video. Servers are in `server`; attention is in `cmab`.

Shapes: B rows, P prompt tokens, T generated tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.keyed import KeyedChoice
from tierwise.curriculum.samples import IMAGE_TAG, Sample

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """What is put around a question before the model's own chat template.

    Attributes:
        system: System message, or "" for none.
        suffix: Text put after the question, such as the answer format asked for.
    """

    system: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A left-padded batch, ready for `model(**inputs)`.

    Attributes:
        inputs: At least `input_ids` (B, P) int64 and `attention_mask` (B, P); pixel values too.
        texts: The prompt of each row as text, before image tokens are expanded.
        num_images: Pictures of each row; empty is one each.
    """

    inputs: Mapping[str, Tensor]
    texts: tuple[str, ...]
    num_images: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What the model wrote.

    Attributes:
        token_ids_BT: int64; after the end token a row holds the pad token.
        lengths_B: Number of tokens of each row, its end token included.
        logprobs_BT: Log-probability of each token under the sampling distribution (temperature
            applied, image tokens excluded); 0 after the end.
        finished_B: Whether the row ended by itself; the others were cut at `max_new_tokens`.
        texts: Decoded, without special tokens.
    """

    token_ids_BT: Tensor
    lengths_B: Tensor
    logprobs_BT: Tensor
    finished_B: Tensor
    texts: tuple[str, ...]


class LocalModel:
    """A transformers model with its processor.

    Args:
        model: An image-text-to-text model.
        processor: Its processor; must hold a tokenizer and a chat template.
        template: What is put around each question.

    Attributes:
        adapter: What `lora.attach_adapter` put into the model, or None.

    Raises:
        UsageError: The processor has no chat template.
    """

    def __init__(
        self, model: Any, processor: Any, *, template: PromptTemplate | None = None
    ) -> None:
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.template = template or PromptTemplate()
        self.adapter: Any = None
        self._prompts: dict[tuple[str, int], str] = {}
        if getattr(processor, "chat_template", None) is None:
            if getattr(self.tokenizer, "chat_template", None) is None:
                raise UsageError(
                    "the model's processor has no chat template",
                    hint="use an instruction-tuned model, or add chat_template.jinja to it",
                )
            processor.chat_template = self.tokenizer.chat_template
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model.eval()

    @classmethod
    def load(
        cls,
        folder_or_id: str | Path,
        *,
        template: PromptTemplate | None = None,
        device: str = "cpu",
        threads: int | None = 1,
        local_only: bool = True,
    ) -> LocalModel:
        """Return the model of a local folder, or of a hub id when `local_only` is False.

        Args:
            folder_or_id: A folder written by `save_pretrained`, or a hub id, which without the
                network must have been downloaded before.
            template: What is put around each question.
            device: Where it runs; 32-bit floats on "cpu", the checkpoint's own type elsewhere.
            threads: Threads of torch in this process (more than one is slower under load, by
                our measurement); None leaves the setting alone.
            local_only: Never ask the network.

        Raises:
            UsageError: No such device here.
            MissingFileError: No such folder.
            DataError: The folder holds no image-text-to-text model that can be loaded.
        """
        _refuse_absent(device)
        if threads is not None:
            torch.set_num_threads(threads)
        if local_only:
            folder_or_id = _local_folder(folder_or_id)
        if Path(folder_or_id, "adapter_config.json").is_file():
            raise DataError(
                f"{folder_or_id} holds an adapter, not a model",
                hint="give the merged model: RUN/model, or merge_and_unload of peft",
            )
        from tierwise.curriculum.families import load_processor, quiet_transformers

        with quiet_transformers():
            import transformers

            auto: Any = transformers.AutoModelForImageTextToText
            try:
                model = auto.from_pretrained(
                    str(folder_or_id),
                    local_files_only=local_only,
                    dtype=torch.float32 if device == "cpu" else "auto",
                )
            except (OSError, ValueError, KeyError) as error:
                reason = str(error).splitlines()[0]
                raise DataError(f"{folder_or_id} is no vision-language model: {reason}") from error
            processor = load_processor(str(folder_or_id), local_only=local_only)
        return cls(model.to(device), processor, template=template)

    @property
    def device(self) -> torch.device:
        """Return where the model's weights are."""
        device = next(self.model.parameters()).device
        assert isinstance(device, torch.device)
        return device

    def model_hash(self) -> str:
        """Return 16 hex digits of the weights as they are now: names, types, shapes, bytes."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{name}|{plain.dtype}|{tuple(plain.shape)}|".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def prompt_hash(self) -> str:
        """Return 16 hex digits of all that turns a question into tokens, the question apart."""
        parts = [
            str(self.processor.chat_template),
            self.template.system,
            self.template.suffix,
            str(getattr(self.processor, "image_processor", "")),
        ]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]

    def prompt_text(self, question: str, *, num_images: int) -> str:
        """Return the prompt as text; pictures stand at the question's tags, else before it."""
        if (question, num_images) not in self._prompts:
            if len(self._prompts) > 4096:
                self._prompts.clear()
            self._prompts[question, num_images] = self._render(question, num_images)
        return self._prompts[question, num_images]

    def messages(self, question: str, *, num_images: int) -> list[dict[str, Any]]:
        """Return the prompt as chat messages; pictures stand at the question's tags, else first."""
        content: list[dict[str, str]] = []
        pieces = question.split(IMAGE_TAG) if IMAGE_TAG in question else None
        if pieces is None:
            content += [{"type": "image"}] * num_images
            content.append({"type": "text", "text": question + self.template.suffix})
        else:
            for number, piece in enumerate(pieces):
                if number and num_images:
                    content.append({"type": "image"})
                text = piece + (self.template.suffix if number == len(pieces) - 1 else "")
                if text.strip():
                    content.append({"type": "text", "text": text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.template.system:
            system = [{"type": "text", "text": self.template.system}]
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _render(self, question: str, num_images: int) -> str:
        messages = self.messages(question, num_images=num_images)
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def encode(
        self, samples: Sequence[Sample], images: Sequence[Sequence[Image.Image]] | None
    ) -> Prompts:
        """Return a batch of prompts.

        Args:
            samples: One a row; only their questions are read.
            images: The pictures of each row, as RGB; None leaves every picture out (blind).
        """
        counts = [len(row) for row in images] if images is not None else [0] * len(samples)
        texts = tuple(
            self.prompt_text(sample.question, num_images=count)
            for sample, count in zip(samples, counts, strict=True)
        )
        arguments: dict[str, Any] = {"text": list(texts), "return_tensors": "pt", "padding": True}
        if images is not None and any(counts):
            arguments["images"] = [list(row) for row in images]
        batch = self.processor(**arguments)
        inputs = {
            name: value.to(self.device)
            for name, value in batch.items()
            if isinstance(value, Tensor)
        }
        return Prompts(inputs=inputs, texts=texts, num_images=tuple(counts))

    def image_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that stand for pictures."""
        config = self.model.config
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        found = {getattr(config, name, None) for name in names}
        return tuple(sorted(token for token in found if isinstance(token, int)))

    def end_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        settings = getattr(self.model, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None) if settings is not None else None
        if ends is None:
            ends = self.tokenizer.eos_token_id
        return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)

    @torch.no_grad()  # not inference_mode: a trainer puts these tensors through autograd
    def generate(
        self,
        prompts: Prompts,
        *,
        seeds: Sequence[int],
        temperature: float,
        max_new_tokens: int,
    ) -> Completions:
        """Return one completion a row.

        Args:
            prompts: From `encode`.
            seeds: One whole number a row, below 2**64; unused when `temperature` is 0.
            temperature: 0 is greedy.
            max_new_tokens: Where a completion is cut, in tokens.

        Raises:
            UsageError: A number of seeds that is not the number of rows, or a bad temperature.
        """
        import transformers

        kit: Any = transformers
        num_rows, prompt_length = prompts.inputs["input_ids"].shape
        if len(seeds) != num_rows:
            raise UsageError(f"{len(seeds)} seeds for {num_rows} prompts")
        if not 0.0 <= temperature < float("inf") or max_new_tokens < 1:
            raise UsageError("temperature must be 0 or more, max_new_tokens 1 or more")
        chooser = KeyedChoice(seeds, temperature, self.image_token_ids(), prompt_length)
        ends, pad = self.end_token_ids(), int(self.tokenizer.pad_token_id)
        settings = kit.GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=list(ends),
            pad_token_id=pad,
            use_cache=True,
        )
        tokens = self.model.generate(
            **prompts.inputs,
            generation_config=settings,
            logits_processor=kit.LogitsProcessorList([chooser]),
        )[:, prompt_length:]
        return self._completions(tokens, torch.stack(chooser.logprobs, dim=1), ends, pad)

    def _completions(
        self, token_ids_BT: Tensor, logprobs_BT: Tensor, ends: tuple[int, ...], pad: int
    ) -> Completions:
        is_end_BT = torch.isin(token_ids_BT, torch.tensor(ends, device=token_ids_BT.device))
        before_BT = is_end_BT.cumsum(1) - is_end_BT.long()  # end tokens strictly before
        kept_BT = before_BT == 0
        token_ids_BT = token_ids_BT.masked_fill(~kept_BT, pad)
        texts = self.tokenizer.batch_decode(
            [row[keep].tolist() for row, keep in zip(token_ids_BT, kept_BT, strict=True)],
            skip_special_tokens=True,
        )
        return Completions(
            token_ids_BT=token_ids_BT,
            lengths_B=kept_BT.sum(1),
            logprobs_BT=logprobs_BT.masked_fill(~kept_BT, 0.0),
            finished_B=is_end_BT.any(1),
            texts=tuple(text.strip() for text in texts),
        )


def _local_folder(folder_or_id: str | Path) -> Path:
    """Return a model's folder, or where the hub's own client keeps what it downloaded."""
    if Path(folder_or_id).is_dir():
        return Path(folder_or_id)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder_or_id)):
        from huggingface_hub import snapshot_download

        with suppress(OSError, ValueError):  # not downloaded; no id at all
            return Path(snapshot_download(str(folder_or_id), local_files_only=True))
    raise MissingFileError(
        f"no model folder {folder_or_id}",
        hint="give a folder; a model of the hub is fetched first with: hf download ID",
    )


def _refuse_absent(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch has no one way of saying so
        reason = str(error).splitlines()[0]
        raise UsageError(f"no device {device!r} here: {reason}", hint='use "cpu"') from error


def append_tokens(prompts: Prompts, token_ids_BT: Tensor, lengths_B: Tensor) -> Prompts:
    """Return prompts followed by text tokens, for going on from them or reading them again.

    Args:
        prompts: From `encode`.
        token_ids_BT: What follows each prompt.
        lengths_B: How many of them are real; the rest is masked.
    """
    inputs = dict(prompts.inputs)
    input_ids_BP, mask_BP = inputs["input_ids"], inputs["attention_mask"]
    steps_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
    real_BT = (steps_T[None] < lengths_B[:, None]).to(mask_BP.dtype)
    shape = input_ids_BP.shape
    for name, value in inputs.items():  # token types: what follows is text, type 0
        if name not in ("input_ids", "attention_mask") and value.shape == shape:
            zeros_BT = value.new_zeros((shape[0], token_ids_BT.shape[1]))
            inputs[name] = torch.cat([value, zeros_BT], dim=1)
    inputs["input_ids"] = torch.cat([input_ids_BP, token_ids_BT], dim=1)
    inputs["attention_mask"] = torch.cat([mask_BP, real_BT], dim=1)
    return replace(prompts, inputs=inputs)
