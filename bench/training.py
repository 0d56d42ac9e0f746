"""Tokens per second of rollout and update, ours against TRL's, and what an update holds in memory.

One batch (16 prompts of 8 rollouts) on the tiny model: our rollouts with prompts shared and with
whole rows, and TRL's `GRPOTrainer`, in turn in one run. The three updates (log probabilities, loss,
backward; no optimizer) are of the same tokens, those that TRL drew. Whole steps through the two
backends follow. TRL's figures hold what its trainer does besides, such as entropies and metrics.

Memory is that of a wider model of the same make (random weights), each optimizer in a process of
its own: the peak over two updates above what the process held before the optimizer was made.

Run it as `python bench/training.py`. Left out: GPUs; vLLM, with which TRL samples faster there.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from trl.data_utils import prepare_multimodal_messages

from harness import Row, ratio_row, row_of, time_in_turn, write_results
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel, Prompts
from tierwise.curriculum.samples import Sample, load_image, read_samples
from tierwise.curriculum.tiny.build import (
    TinyConfig,
    build_model,
    build_processor,
    tiny_model_path,
)
from tierwise.curriculum.tiny.tasks import write_dataset
from tierwise.curriculum.training import trl_backend
from tierwise.curriculum.training.book import TrainResult
from tierwise.curriculum.training.grpo import GrpoConfig, Loss, policy_loss, token_weights
from tierwise.curriculum.training.loop import SamplingConfig, TrainConfig, train_grpo
from tierwise.curriculum.training.recipe import judged
from tierwise.curriculum.training.rollouts import Rollouts, completion_logprobs, sample_rollouts
from tierwise.curriculum.training.trl_data import grpo_row, ordered_dataset, verdict_rewards

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 16, 8, 8
NUM_RUNS, NUM_STEPS, NUM_MEMORY_RUNS = 7, 4, 3
WIDER = TinyConfig(width=512, layers=8, heads=8, mlp_width=2048)


def main() -> None:
    """Measure, print the ratios, and write the result file."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), num_samples=NUM_PROMPTS, seed=1, split="train")
        samples = read_samples(Path(folder) / "samples.jsonl").samples
        rows = [*passes(samples, Path(folder)), *steps(samples, Path(folder))]
    rows += memory()
    config = {
        "prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    packages = ("torch", "transformers", "trl")
    print(write_results("training", rows, config=config, packages=packages))


def passes(samples: tuple[Sample, ...], folder: Path) -> list[Row]:
    """Return rows about sampling and updating alone."""
    model = LocalModel.load(tiny_model_path())
    prompt_B = torch.arange(NUM_PROMPTS).repeat_interleave(GROUP_SIZE)
    seeds = [key_seed("bench", number) for number in range(len(prompt_B))]

    def encode() -> Prompts:
        pictures = [[load_image(path) for path in sample.images] for sample in samples]
        return model.encode(samples, pictures)

    def sample(share: bool) -> Rollouts:
        return sample_rollouts(
            model, encode(), prompt_B, seeds=seeds, temperature=1.0,
            max_new_tokens=MAX_NEW_TOKENS, share_prompts=share,
        )  # fmt: skip

    trainer = trainer_of_trl(samples, folder)
    asked = [grpo_row(model, one) for one in samples for _ in range(GROUP_SIZE)]
    theirs = trainer._generate_and_score_completions(asked)
    made = Rollouts(
        prompts=encode(), prompt_B=prompt_B, token_ids_BT=theirs["completion_ids"],
        mask_BT=theirs["completion_mask"].bool(), logprob_BT=torch.zeros(0),
        finished_B=torch.zeros(0), texts=(),
    )  # fmt: skip
    weight_BT = token_weights(made.mask_BT, Loss.GRPO, MAX_NEW_TOKENS)

    def update(share: bool) -> None:
        logprob_BT = completion_logprobs(model, made, temperature=1.0, share_prompts=share)
        loss = policy_loss(
            logprob_BT, logprob_BT.detach(), theirs["advantages"], weight_BT,
            GrpoConfig(kl_weight=0.0),
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]
        model.model.zero_grad(set_to_none=True)

    def update_of_trl() -> None:
        trainer._compute_loss(trainer.model, theirs).backward()
        trainer.model.zero_grad(set_to_none=True)

    drawn: dict[str, list[int]] = {"TRL": []}

    def sample_of_trl() -> None:
        messages = [
            prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in asked
        ]
        drawn["TRL"].append(sum(len(ids) for ids in trainer._generate(messages)[1]))

    seconds = time_in_turn(
        {
            "sampling, shared": lambda: sample(True),
            "sampling, whole rows": lambda: sample(False),
            "sampling, TRL": sample_of_trl,
            "update, shared": lambda: update(True),
            "update, whole rows": lambda: update(False),
            "update, TRL": update_of_trl,
        },
        num_runs=NUM_RUNS,
    )
    own_tokens = int(sample(True).mask_BT.sum())
    num_tokens = int(made.mask_BT.sum())
    counts: dict[str, list[int]] = {
        name: [own_tokens if name.startswith("sampling") else num_tokens] * NUM_RUNS
        for name in seconds
    }
    counts["sampling, TRL"] = drawn["TRL"][-NUM_RUNS:]
    return rate_rows(seconds, counts)


def rate_rows(seconds: Mapping[str, list[float]], counts: Mapping[str, list[int]]) -> list[Row]:
    """Return seconds, tokens per second, and what sharing and TRL are to whole rows and to us."""
    rows = [row_of(name, values, unit="s") for name, values in seconds.items()]
    rates = {
        name: [n / value for n, value in zip(counts[name], values, strict=True)]
        for name, values in seconds.items()
    }
    rows += [row_of(name, values, unit="tokens/s") for name, values in rates.items()]
    for what in ("sampling", "update"):
        shared = rates[f"{what}, shared"]
        for name in ("whole rows", "TRL"):
            title = f"{what}: tokens/s shared / {name}"
            rows.append(ratio_row(title, shared, rates[f"{what}, {name}"]))
    return rows


def trainer_of_trl(samples: tuple[Sample, ...], folder: Path) -> Any:
    """Return a trainer as the TRL backend would make it, ready to sample and to compute a loss."""
    import trl
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    model = LocalModel.load(tiny_model_path())
    kit: Any = trl
    data = ordered_dataset(
        samples, lambda one: grpo_row(model, one), places=range(NUM_PROMPTS), shuffle=False, seed=1
    )
    trainer = kit.GRPOTrainer(
        model=model.model, processing_class=model.processor, train_dataset=data,
        reward_funcs=[verdict_rewards],
        args=kit.GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
            num_generations=GROUP_SIZE, max_completion_length=MAX_NEW_TOKENS, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", loss_type="grpo",
        ),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def steps(samples: tuple[Sample, ...], folder: Path) -> list[Row]:
    """Return rows about whole steps, rewards and AdamW included, of the two backends."""
    config = TrainConfig(
        steps=NUM_STEPS,
        sampling=SamplingConfig(
            prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS
        ),
        objective=GrpoConfig(kl_weight=0.0),
    )
    trainers: dict[str, Callable[..., TrainResult]] = {
        "ours": train_grpo,
        "TRL": trl_backend.train_grpo,
    }
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for run in range(3):
        for name, train in trainers.items():
            model = LocalModel.load(tiny_model_path())
            optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-5, fused=True)
            result = train(
                model, samples, optimizer, config, folder=folder / f"{name}{run}", seed=run,
                reward=judged,
            )  # fmt: skip
            seconds[name] += [
                sum(value for key, value in row["timing"].items() if key.endswith("_s"))
                for row in result.metrics[1:]  # the first warms up
            ]
    rows = [row_of(f"whole step, {name}", values, unit="s") for name, values in seconds.items()]
    return [*rows, ratio_row("whole step: TRL / ours", seconds["TRL"], seconds["ours"])]


def memory() -> list[Row]:
    """Return rows about the peak of an update by optimizer, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {"AdamW": [], "OffloadAdamW": []}
    for _ in range(NUM_MEMORY_RUNS):
        for name, values in found.items():
            done = subprocess.run(
                [sys.executable, __file__, "--memory", name],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            values.append(json.loads(done.stdout))
    mib = 2**20
    rows = []
    for name, values in found.items():
        note = (
            f"{values[0]['parameters'] / 1e6:.1f} M parameters of 32 bit, all in host memory; "
            f"state_dict {values[0]['state_bytes'] / mib:.0f} MiB"
        )
        rows.append(
            row_of(
                f"update, peak above the model, {name}",
                [value["peak_bytes"] / mib for value in values], unit="MiB", note=note,
            )
        )  # fmt: skip
    rows.append(
        ratio_row(
            "update, peak: OffloadAdamW / AdamW",
            [value["peak_bytes"] for value in found["OffloadAdamW"]],
            [value["peak_bytes"] for value in found["AdamW"]],
            note="without a GPU there is no second memory to offload to: at most a cost is seen",
        )
    )
    return rows


def memory_of(name: str) -> dict[str, float]:
    """Return bytes of two updates with an optimizer, in this process."""
    from tierwise.offload import OffloadAdamW

    torch.set_num_threads(1)
    model = LocalModel(build_model(WIDER, seed=1), build_processor(WIDER))
    module = model.model
    prompts = model.encode([Sample(id="1", question="what is the digit ?", answer="1")], None)
    before = resident_bytes()
    make = OffloadAdamW if name == "OffloadAdamW" else torch.optim.AdamW
    optimizer = make(module.parameters(), lr=1e-5)
    for _ in range(2):
        module(**prompts.inputs).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = [
        tensor.numel() * tensor.element_size()
        for state in optimizer.state_dict()["state"].values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
    trained = sum(parameter.numel() for parameter in module.parameters())
    return {"peak_bytes": peak, "state_bytes": sum(held), "parameters": trained}


def resident_bytes() -> int:
    """Return the memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    if "--memory" in sys.argv:
        with redirect_stdout(StringIO()):
            measured = memory_of(sys.argv[-1])
        print(json.dumps(measured))
    else:
        main()
