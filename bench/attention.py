"""What attention balance costs: streamed sums against keeping every map, in time and memory.

At two sizes: the tiny model that ships (35 tokens), and a random LLaVA of 8 layers with 1,024 image
tokens, whose answers are random words. A plain pass over the same tokens stands beside both, since
that is what nobody can do without. Memory is the most that torch held at once, kernels' workspace
included, above that of the plain pass. Run it as `python bench/attention.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harness import Row, ratio_row, row_of, time_in_turn, write_results
from tierwise.curriculum.difficulty.cmab import measure_balance, text_config
from tierwise.curriculum.models import Completions, LocalModel, Prompts, append_tokens
from tierwise.curriculum.samples import Sample, load_image, read_samples
from tierwise.curriculum.tiny.build import (
    TinyConfig,
    build_model,
    build_processor,
    num_image_tokens,
    tiny_model_path,
)
from tierwise.curriculum.tiny.tasks import write_dataset

LONG = TinyConfig(image_side=448, patch_side=14, vision_layers=1, vision_width=64, layers=8,
                  width=256, heads=8, mlp_width=768, max_positions=2048)  # fmt: skip
LONG_ROWS, LONG_ANSWER = 2, 64
MIB = 1 << 20


def main() -> None:
    """Measure both sizes, print the rows, and write the result file."""
    rows = [*_tiny(), *_long()]
    config = {"long": {"image_tokens": num_image_tokens(LONG), "layers": LONG.layers,
                       "width": LONG.width, "rows": LONG_ROWS, "answer": LONG_ANSWER}}  # fmt: skip
    print(write_results("attention", rows, config=config, packages=("torch", "transformers")))


def _tiny() -> list[Row]:
    model = LocalModel.load(tiny_model_path())
    with tempfile.TemporaryDirectory() as name:
        samples = read_samples(write_dataset(Path(name), 16, 23, "held_out")).samples
        prompts = model.encode(samples, [[load_image(one.images[0])] for one in samples])
    done = model.generate(prompts, seeds=[0] * len(samples), temperature=0.0, max_new_tokens=8)
    return _compare("shipped model", model, samples, prompts, done, num_runs=9)


def _long() -> list[Row]:
    model = LocalModel(build_model(LONG, seed=0), build_processor(LONG))
    sample = Sample(id="a", question="what is the left digit ?", answer="1", images=(Path("a"),))
    picture = Image.effect_noise((448, 448), 64).convert("RGB")
    samples = [sample] * LONG_ROWS
    prompts = model.encode(samples, [[picture]] * LONG_ROWS)
    shape = (LONG_ROWS, LONG_ANSWER)
    words = torch.randint(10, 40, shape, generator=torch.Generator().manual_seed(0))
    done = Completions(
        token_ids_BT=words,
        lengths_B=torch.full((LONG_ROWS,), LONG_ANSWER),
        logprobs_BT=torch.zeros(shape),
        finished_B=torch.ones(LONG_ROWS, dtype=torch.bool),
        texts=("",) * LONG_ROWS,
    )
    return _compare("1,024 image tokens", model, samples, prompts, done, num_runs=5)


def _compare(
    name: str,
    model: LocalModel,
    samples: Sequence[Sample],
    prompts: Prompts,
    done: Completions,
    *,
    num_runs: int,
) -> list[Row]:
    inputs = append_tokens(prompts, done.token_ids_BT[:, :-1], done.lengths_B).inputs
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: _forward(model, inputs, maps=False),
        "stream": lambda: measure_balance(model, samples, prompts, done),
        "maps": lambda: _forward(model, inputs, maps=True),
    }
    seconds = time_in_turn(ways, num_runs=num_runs)
    peaks = {way: _peak_bytes(run) for way, run in ways.items()}
    layers = text_config(model).num_hidden_layers
    rows, length = inputs["input_ids"].shape
    note = f"{layers} layers, {rows} rows, {length} tokens"
    extra = {way: (peaks[way] - peaks["plain"]) / MIB for way in ("stream", "maps")}
    return [
        row_of(f"{name}: plain pass", seconds["plain"], unit="s", note=note),
        row_of(f"{name}: balance streamed", seconds["stream"], unit="s"),
        row_of(f"{name}: maps kept", seconds["maps"], unit="s",
               note="without the sums taken from them"),
        ratio_row(f"{name}: maps / streamed, time", seconds["maps"], seconds["stream"]),
        ratio_row(f"{name}: streamed / plain pass, time", seconds["stream"], seconds["plain"]),
        row_of(f"{name}: extra peak memory, streamed", [extra["stream"]], unit="MiB",
               note="negative: logits of the prompt are not made"),
        row_of(f"{name}: extra peak memory, maps", [extra["maps"]], unit="MiB"),
    ]  # fmt: skip


@torch.no_grad()
def _forward(model: LocalModel, inputs: Mapping[str, Tensor], *, maps: bool) -> None:
    before = text_config(model)._attn_implementation
    if maps:  # only eager attention returns them
        model.model.set_attn_implementation("eager")
    try:
        model.model(**inputs, use_cache=False, output_attentions=maps)
    finally:
        if maps:
            model.model.set_attn_implementation(before)


def _peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that torch held at once in a call, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    assert seen.profiler is not None
    results = seen.profiler.kineto_results.events()
    moments = sorted((one.start_ns(), one.nbytes()) for one in results if one.name() == "[memory]")
    live = most = 0
    for _, change in moments:
        live += change
        most = max(most, live)
    return most


if __name__ == "__main__":
    main()
