"""Train the same model with AdamW and with OffloadAdamW, in a plain loop; print both hashes."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tierwise.offload import OffloadAdamW


def train(*, offloaded: bool, steps: int = 30) -> tuple[str, str]:
    """Return the hash of the trained weights, and what the optimizer did."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 200, 0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 16))
    optimizer: torch.optim.Optimizer
    if offloaded:
        optimizer = OffloadAdamW(model, 1e-3, weight_decay=0.1, max_grad_norm=0.8)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1, fused=True)
    for _ in range(steps):
        batch = torch.randn(8, 10, 16)
        (model(batch) - batch.roll(1, dims=1)).square().mean().backward()
        if not offloaded:
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest(), str(getattr(optimizer, "counts", ""))


if __name__ == "__main__":
    (theirs, _), (ours, counts) = train(offloaded=False), train(offloaded=True)
    print(f"AdamW        {theirs}\nOffloadAdamW {ours}\n{counts}")
    print("equal" if ours == theirs else "DIFFERENT")
