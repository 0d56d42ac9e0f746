"""What computing a prompt once for all its rollouts saves, on the tiny model.

Sampling and update of the same step (16 prompts of 8 rollouts), with prompts shared and with whole
rows, in turn in one run; the rollouts are the same tokens. Run it as `python bench/training.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from harness import Row, ratio_row, row_of, time_in_turn, write_results
from tierwise.curriculum.grpo import GrpoConfig, Loss, policy_loss, token_weights
from tierwise.curriculum.models import LocalModel, key_seed
from tierwise.curriculum.rollouts import completion_logprobs, sample_rollouts
from tierwise.curriculum.samples import load_image, read_samples
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.tiny.tasks import write_dataset

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 16, 8, 8


def main() -> None:
    """Time both ways, print the ratios, and write the result file."""
    model = LocalModel.load(tiny_model_path())
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), num_samples=NUM_PROMPTS, seed=1, split="train")
        samples = read_samples(Path(folder) / "samples.jsonl").samples
        images = [[load_image(path) for path in sample.images] for sample in samples]
    prompts = model.encode(samples, images)
    prompt_B = torch.arange(NUM_PROMPTS).repeat_interleave(GROUP_SIZE)
    seeds = [key_seed("bench", number) for number in range(len(prompt_B))]

    def sample(share: bool) -> object:
        return sample_rollouts(
            model, prompts, prompt_B, seeds=seeds, temperature=1.0,
            max_new_tokens=MAX_NEW_TOKENS, share_prompts=share,
        )  # fmt: skip

    made = sample_rollouts(
        model, prompts, prompt_B, seeds=seeds, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS
    )
    weight_BT = token_weights(made.mask_BT, Loss.GRPO, MAX_NEW_TOKENS)
    advantage_B = torch.linspace(-1, 1, len(prompt_B))

    def update(share: bool) -> None:
        logprob_BT = completion_logprobs(model, made, temperature=1.0, share_prompts=share)
        loss = policy_loss(
            logprob_BT, logprob_BT.detach(), advantage_B, weight_BT, GrpoConfig(kl_weight=0.0)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        model.model.zero_grad(set_to_none=True)

    seconds = time_in_turn(
        {
            "sampling, shared": lambda: sample(True),
            "sampling, whole rows": lambda: sample(False),
            "update, shared": lambda: update(True),
            "update, whole rows": lambda: update(False),
        },
        num_runs=9,
    )
    num_tokens = int(made.mask_BT.sum())
    rows: list[Row] = [row_of(name, values, unit="s") for name, values in seconds.items()]
    for what in ("sampling", "update"):
        whole, shared = seconds[f"{what}, whole rows"], seconds[f"{what}, shared"]
        rows.append(ratio_row(f"{what}: whole rows / shared", whole, shared))
        rates = [num_tokens / value for value in shared]
        rows.append(row_of(f"{what}, shared", rates, unit="tokens/s"))
    config = {"prompts": NUM_PROMPTS, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS}
    packages = ("torch", "transformers")
    print(write_results("training", rows, config=config, packages=packages))


if __name__ == "__main__":
    main()
