"""Train the same tiny Qwen2 with the HF Trainer, its AdamW and OffloadAdamW; print both hashes.

Needs `pip install accelerate`.
"""

from __future__ import annotations

import hashlib
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from tierwise.offload.adapters import use_with_trainer


def train(*, offloaded: bool, steps: int = 20) -> str:
    """Return the hash of the trained weights."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4, use_cpu=True,
            gradient_accumulation_steps=2, learning_rate=1e-3, weight_decay=0.1, report_to=[],
            optim="adamw_torch_fused", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        optimizer = use_with_trainer(trainer) if offloaded else None  # the only line to add
        trainer.train()
    if optimizer is not None:
        print(optimizer.counts)
        optimizer.close()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    theirs, ours = train(offloaded=False), train(offloaded=True)
    print(f"AdamW        {theirs}\nOffloadAdamW {ours}")
    print("equal" if ours == theirs else "DIFFERENT")
