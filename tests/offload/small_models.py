"""Small real models of four kinds, and batches for them by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its loss on micro-batch number n, and a clip norm that clips some steps."""

    make: Callable[[], nn.Module]
    loss: Loss
    sometimes: float


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + number)


class Layer(nn.Module):
    """A pre-norm transformer layer with odd sizes, so that torch's scalar tail is met."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width + 1), nn.GELU(),
                                 nn.Linear(3 * width + 1, width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt(nn.Module):
    """Token model; `tied` shares the embedding with the head, `unused` adds an idle layer."""

    def __init__(self, *, width: int = 30, layers: int = 3, vocabulary: int = 37,
                 tied: bool = False, unused: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 3) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if unused:
            self.idle = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


def gpt_loss(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(0, 37, (4, 9), generator=_generator(number))
    tokens = tokens.sort(dim=1).values  # something to learn
    logits = model(tokens[:, :-1]).float()
    scale = 1.0 + 3.0 * (number % 5 == 2)  # some steps have a larger gradient
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return scale * loss


class Experts(nn.Module):
    """Mixture of experts: one of four sees the batch, the others are idle."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 17), nn.Linear(17, width))
                                     for _ in range(4))  # fmt: skip
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        result: Tensor = self.leave(self.experts[chosen](functional.gelu(self.enter(x))))
        return result


def experts_loss(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(6, 8, generator=_generator(number))
    scale = 1.0 + 4.0 * (number % 4 == 1)
    return scale * functional.mse_loss(model(x, (number // 2) % 3), x[:, :3].sin())


class Vit(nn.Module):
    """Patches of a 12 x 12 picture -> 5 classes; the patch filter is channels_last."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        filters = self.patches.weight.detach().contiguous(memory_format=torch.channels_last)
        self.patches.weight = nn.Parameter(filters)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 10, width))
        self.layers = nn.Sequential(*(Layer(width, 2) for _ in range(2)))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        result: Tensor = self.head(self.layers(x)[:, 0])
        return result


def vit_loss(model: nn.Module, number: int) -> Tensor:
    images = torch.randn(5, 3, 12, 12, generator=_generator(number))
    scale = 1.0 + 3.0 * (number % 3 == 0)
    return scale * functional.cross_entropy(model(images), torch.arange(5))


def make_llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        Qwen2Config,
    )

    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                              num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    text = Qwen2Config(vocab_size=41, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                       tie_word_embeddings=True)  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=40,
                    vision_feature_layer=-1, image_seq_length=4, tie_word_embeddings=True)
    )  # fmt: skip


def llava_loss(model: nn.Module, number: int) -> Tensor:
    words = torch.randint(0, 40, (3, 7), generator=_generator(number))
    tokens = torch.cat([torch.full((3, 4), 40), words], dim=1)
    images = torch.randn(3, 3, 8, 8, generator=_generator(number))
    logits = model(input_ids=tokens, pixel_values=images,
                   attention_mask=torch.ones_like(tokens)).logits[:, 4:-1]  # fmt: skip
    scale = 1.0 + 2.0 * (number % 4 == 3)
    return scale * functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


CASES = {
    "gpt": Case(make=Gpt, loss=gpt_loss, sometimes=4.0),
    "gpt-tied": Case(make=lambda: Gpt(tied=True, unused=True), loss=gpt_loss, sometimes=4.0),
    "vit": Case(make=Vit, loss=vit_loss, sometimes=8.0),
    "experts": Case(make=Experts, loss=experts_loss, sometimes=1.5),
    "llava": Case(make=make_llava, loss=llava_loss, sometimes=3.0),
}
