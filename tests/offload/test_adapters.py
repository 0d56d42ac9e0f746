"""The real trainers on a tiny model: the same weights as with their own fused AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.small_models import Gpt, gpt_loss
from tierwise.core.errors import UsageError
from tierwise.offload import OffloadAdamW, fingerprint
from tierwise.offload.adapters import connect_accelerator, use_with_trainer

# other people's packages warn as they like
pytestmark = pytest.mark.filterwarnings("ignore")


def tiny_qwen() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, hidden_size=36, intermediate_size=50, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                    bos_token_id=0, eos_token_id=1, pad_token_id=2)
    )  # fmt: skip


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 64, (12,), generator=generator) for _ in range(48)]
    return [{"input_ids": t, "labels": t} for t in tokens]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("limit", [0.0, 1.0, 1.4])
def test_trainer(tmp_path: Path, limit: float, accumulation: int) -> None:
    pytest.importorskip("accelerate", reason="the HF Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    def train(offloaded: bool) -> tuple[str, list[float]]:
        model = tiny_qwen()
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=8, use_cpu=True,
            gradient_accumulation_steps=accumulation, learning_rate=1e-2, weight_decay=0.1,
            max_grad_norm=limit, optim="adamw_torch_fused", report_to=[], logging_steps=1,
            save_strategy="no", seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows())
        ours = use_with_trainer(trainer, mode="speculate") if offloaded else None
        trainer.train()
        if ours is not None:
            assert ours.counts.steps == 8
            share = ours.counts.kept / (ours.counts.kept + ours.counts.redone)
            assert share == pytest.approx(1 - ours.counts.clipped / 8)
            ours.close()
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        return fingerprint(model), norms

    assert train(True) == train(False)


@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_accelerate(limit: float) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(offloaded: bool) -> str:
        torch.manual_seed(0)
        model: nn.Module = Gpt()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer: Any = (
            OffloadAdamW(model, 1e-2, mode="speculate")
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        inner = optimizer
        if offloaded:
            connect_accelerator(accelerator, optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        for number in range(12):
            with accelerator.accumulate(model):
                accelerator.backward(gpt_loss(model, number))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
        if offloaded:
            assert inner.counts.steps == 6
            assert inner.counts.kept > 0 or inner.counts.clipped == 6
            inner.close()
        return fingerprint(model)

    assert train(True) == train(False)


def test_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")

    def train(offloaded: bool) -> str:
        model = tiny_qwen()
        config = trl.SFTConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=5, use_cpu=True,
            learning_rate=1e-2, max_grad_norm=1.4, optim="adamw_torch_fused", report_to=[],
            save_strategy="no", seed=0, disable_tqdm=True, bf16=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        table = datasets.Dataset.from_list(
            [{"input_ids": row["input_ids"].tolist()} for row in rows()]
        )

        def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            tokens = torch.tensor([row["input_ids"] for row in batch])
            return {"input_ids": tokens, "labels": tokens,
                    "attention_mask": torch.ones_like(tokens)}  # fmt: skip

        trainer = trl.SFTTrainer(
            model, args=config, train_dataset=table, data_collator=collate,
            processing_class=_tokenizer(),
        )  # fmt: skip
        ours = use_with_trainer(trainer, mode="auto") if offloaded else None
        trainer.train()
        if ours is not None:
            assert ours.counts.steps == 5
            ours.close()
        return fingerprint(model)

    assert train(True) == train(False)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    core: Any = Tokenizer(models.WordLevel(words, unk_token="w0"))
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, pad_token="w2", eos_token="w1", unk_token="w0")


def test_what_cannot_be_connected_is_refused() -> None:
    class Several:
        distributed_type = "MULTI_GPU"

    class Owner:
        optimizer = object()

    ours = OffloadAdamW(Gpt())
    with pytest.raises(UsageError, match="one process, not under MULTI_GPU"):
        connect_accelerator(Several(), ours)
    with pytest.raises(UsageError, match="already has an optimizer"):
        use_with_trainer(Owner())
    ours.close()


def test_clip_on_step_takes_the_place_of_clipping_by_hand() -> None:
    def train(offloaded: bool) -> tuple[str, list[float]]:
        torch.manual_seed(0)
        model, norms = Gpt(), []
        optimizer: Any = (
            OffloadAdamW(model, 1e-2, mode="speculate")
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        for step in range(10):
            gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
            if offloaded:
                norms.append(float(optimizer.clip_on_step(4.0)))
            else:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 4.0)))
            optimizer.step()
            optimizer.zero_grad()
        if offloaded:
            assert optimizer.counts.kept > 0
            optimizer.close()
        return fingerprint(model), norms

    assert train(True) == train(False)


def test_blocks_compiled_one_by_one() -> None:
    def train(offloaded: bool) -> str:
        torch.manual_seed(0)
        model = Gpt()
        optimizer: Any = (
            OffloadAdamW(model, 1e-2, mode="speculate", max_grad_norm=4.0, overlap_forward=True)
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        for layer in model.layers:
            layer.compile(backend="aot_eager")  # the same graphs, without a C++ compiler
        for step in range(6):
            gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
            if not offloaded:
                nn.utils.clip_grad_norm_(model.parameters(), 4.0)
            optimizer.step()
            optimizer.zero_grad()
        if offloaded:
            assert optimizer.counts.kept > 0
        return fingerprint({k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()})

    assert train(True) == train(False)
