from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.keyed import key_seed, keyed_uniform
from tierwise.curriculum.models import LocalModel, Prompts, PromptTemplate
from tierwise.curriculum.samples import Sample, SampleSet, load_image
from tierwise.curriculum.tiny import build


def encode(model: LocalModel, samples: tuple[Sample, ...]) -> Prompts:
    return model.encode(samples, [[load_image(sample.images[0])] for sample in samples])


def test_a_row_does_not_depend_on_its_neighbours(tiny: LocalModel, held_out: SampleSet) -> None:
    samples = held_out.samples[:12]
    seeds = [key_seed("row", sample.id) for sample in samples]
    whole = tiny.generate(encode(tiny, samples), seeds=seeds, temperature=1.0, max_new_tokens=8)
    part = tiny.generate(
        encode(tiny, samples[5:8]), seeds=seeds[5:8], temperature=1.0, max_new_tokens=8
    )
    assert whole.texts[5:8] == part.texts
    longest = part.token_ids_BT.shape[1]
    assert torch.equal(whole.token_ids_BT[5:8, :longest], part.token_ids_BT)
    torch.testing.assert_close(
        whole.logprobs_BT[5:8, :longest], part.logprobs_BT, rtol=0, atol=1e-4
    )


def test_greedy_is_what_transformers_own_greedy_decoding_gives(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    prompts = encode(tiny, held_out.samples[:8])
    ours = tiny.generate(prompts, seeds=[0] * 8, temperature=0.0, max_new_tokens=8)
    theirs = tiny.model.generate(**prompts.inputs, do_sample=False, max_new_tokens=8)
    length = prompts.inputs["input_ids"].shape[1]
    assert torch.equal(ours.token_ids_BT, theirs[:, length:])


def test_sampling_follows_the_model_s_distribution(tiny: LocalModel, held_out: SampleSet) -> None:
    sample = held_out.samples[0]
    one = encode(tiny, (sample,))
    with torch.no_grad():
        logits = tiny.model(**one.inputs).logits[0, -1].double()
    logits[list(tiny.image_token_ids())] = -torch.inf
    expected = torch.softmax(logits / 1.5, dim=0)
    many = Prompts(
        inputs={name: value.repeat_interleave(2000, 0) for name, value in one.inputs.items()},
        texts=one.texts * 2000,
    )
    done = tiny.generate(many, seeds=range(2000), temperature=1.5, max_new_tokens=1)
    counts = torch.bincount(done.token_ids_BT[:, 0], minlength=len(expected)).double() / 2000
    spread = (expected * (1 - expected) / 2000).sqrt()
    assert ((counts - expected).abs() <= 5 * spread + 1e-3).all()
    chosen = expected[done.token_ids_BT[:, 0]].log()
    torch.testing.assert_close(done.logprobs_BT[:, 0].double(), chosen, rtol=0, atol=1e-4)


def test_lengths_stop_at_the_end_token(tiny: LocalModel, held_out: SampleSet) -> None:
    done = tiny.generate(
        encode(tiny, held_out.samples), seeds=range(40), temperature=1.0, max_new_tokens=3
    )
    end, pad = tiny.end_token_ids()[0], tiny.tokenizer.pad_token_id
    for tokens, length, finished in zip(
        done.token_ids_BT.tolist(), done.lengths_B.tolist(), done.finished_B.tolist(), strict=True
    ):
        assert (end in tokens) == finished
        assert length == (tokens.index(end) + 1 if finished else len(tokens))
        assert all(token == pad for token in tokens[length:])
    assert set(done.finished_B.tolist()) == {True, False}


def test_uniform_numbers_are_a_function_of_seed_and_step() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    first = keyed_uniform(seeds, 0)
    assert np.array_equal(first[7:9], keyed_uniform(seeds[7:9], 0))
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(first, keyed_uniform(seeds, 1))[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03


def test_hashes_follow_weights_and_template(
    random_tiny: Callable[[int, int], LocalModel],
) -> None:
    first, again, other = random_tiny(3, 0), random_tiny(3, 0), random_tiny(3, 1)
    assert first.model_hash() == again.model_hash() != other.model_hash()
    with torch.no_grad():
        next(again.model.parameters()).view(-1)[0] += 1e-3
    assert first.model_hash() != again.model_hash()
    asked = LocalModel(first.model, first.processor, template=PromptTemplate(suffix=" ?"))
    assert asked.prompt_hash() != first.prompt_hash()


def test_pictures_stand_where_the_tags_are(tiny: LocalModel) -> None:
    assert tiny.prompt_text("what is it ?", num_images=1) == "<user><image>what is it ?<ans>"
    assert tiny.prompt_text("left <image> right", num_images=1) == "<user>left <image> right<ans>"
    assert tiny.prompt_text("left <image> right", num_images=0) == "<user>left  right<ans>"


def test_a_rescaled_picture_is_not_rescaled_twice(tiny: LocalModel) -> None:
    from PIL import Image

    sample = Sample(id="w", question="what is it ?", answer="1", images=(Path("w.png"),))
    white = tiny.encode([sample], [[Image.new("RGB", (48, 48), (255, 255, 255))]])
    black = tiny.encode([sample], [[Image.new("RGB", (48, 48))]])
    assert white.inputs["pixel_values"].max() == pytest.approx(1.0)
    assert black.inputs["pixel_values"].min() == pytest.approx(-1.0)


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no model folder"):
        LocalModel.load(tmp_path / "nothing")
    with pytest.raises(DataError, match="no vision-language model"):
        LocalModel.load(tmp_path)
    config = build.TinyConfig(layers=3)
    processor = build.build_processor(config)
    processor.chat_template = None
    processor.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        LocalModel(build.build_model(config, seed=0), processor)


def test_seeds_must_match_rows(tiny: LocalModel, held_out: SampleSet) -> None:
    prompts = encode(tiny, held_out.samples[:2])
    with pytest.raises(UsageError, match="1 seeds for 2 prompts"):
        tiny.generate(prompts, seeds=[1], temperature=1.0, max_new_tokens=2)
    with pytest.raises(UsageError, match="temperature"):
        tiny.generate(prompts, seeds=[1, 2], temperature=-1.0, max_new_tokens=2)


def test_a_hub_id_that_was_downloaded_is_a_model_and_asks_no_network(tmp_path: Path) -> None:
    """In the layout of the hub's cache: refs/main names a snapshot, whose files are links."""
    cached = tmp_path / "hub" / "models--some--tiny"
    snapshot = cached / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    for file in build.tiny_model_path().iterdir():
        (snapshot / file.name).symlink_to(file)
    script = (
        "import socket\n"
        "socket.socket.connect = None\n"
        "from tierwise.curriculum.models import LocalModel\n"
        "print(LocalModel.load('some/tiny').model_hash())\n"
        "LocalModel.load('some/other')\n"
    )
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    env["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == LocalModel.load(build.tiny_model_path()).model_hash()
    assert done.stderr.splitlines()[-1].endswith("MissingFileError: no model folder some/other")
