"""Two processes with DistributedDataParallel train to torch's bits; sharded weights are refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn

from tests.offload.small_models import Gpt, gpt_loss
from tierwise.core.errors import UsageError
from tierwise.offload import OffloadAdamW, fingerprint

WAYS: dict[str, dict[str, Any]] = {
    "during backward": {"mode": "speculate"},
    "late weights": {"mode": "defer"},
    "auto": {"mode": "auto", "overlap_forward": True},
}
Result = tuple[str, list[float]]


def _train(model: nn.Module, optimizer: Any, rank: int, *, view: bool, parts: int) -> Result:
    parallel = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=0.01, gradient_as_bucket_view=view
    )  # small buckets: some are averaged while others are not ready
    norms = []
    for step in range(6):
        for part in range(parts):
            last = part == parts - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = gpt_loss(parallel, parts * (2 * step + rank) + part)
                loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(optimizer, OffloadAdamW):
            optimizer.step()
            norms.append(optimizer.grad_norm or 0.0)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(parallel.parameters(), 1.5)))
            optimizer.step()
        optimizer.zero_grad()
    return fingerprint(model.state_dict()), norms


def _process(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)

    def fresh(**options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Gpt()
        if not options:
            return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        return model, OffloadAdamW(model, 1e-2, max_grad_norm=1.5, **options)

    early = fresh(mode="speculate")  # made before there is a group
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    found: dict[str, Result] = {}
    for view, parts in ((False, 1), (True, 2)):
        name = f"view {view}, {parts} parts"
        found[f"{name}: torch"] = _train(*fresh(), rank, view=view, parts=parts)
        for way, options in WAYS.items():
            found[f"{name}: {way}"] = _train(*fresh(**options), rank, view=view, parts=parts)
    found["view False, 1 parts: early"] = _train(*early, rank, view=False, parts=1)
    distributed.destroy_process_group()
    results.put(found)


@pytest.mark.slow
def test_two_processes_train_to_the_bits_of_torch(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, str(tmp_path), results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    first, second = results.get(timeout=300), results.get(timeout=300)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert first == second
    for name, result in first.items():
        assert result == first[name.split(":")[0] + ": torch"], name
    norms = first["view False, 1 parts: torch"][1]
    assert min(norms) < 1.5 < max(norms)  # some steps are clipped, some not


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = Gpt()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match=r"parameter 0 \(37, 30\) is a DTensor") as caught:
            OffloadAdamW(model)
    finally:
        distributed.destroy_process_group()
    assert "DistributedDataParallel" in (caught.value.hint or "")
