from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tierwise.core.errors import StateError, UsageError
from tierwise.curriculum.difficulty import cmab
from tierwise.curriculum.difficulty.balance import Variant, balance_of, quantile_strata, stratum_of
from tierwise.curriculum.difficulty.cmab import measure_balance, token_sets
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.models import Completions, LocalModel, Prompts, append_tokens
from tierwise.curriculum.samples import Sample, SampleSet, load_image
from tierwise.curriculum.tiny import build

Maker = Callable[[int, int], LocalModel]


def asked(
    model: LocalModel, samples: tuple[Sample, ...], max_new_tokens: int = 8
) -> tuple[Prompts, Completions]:
    prompts = model.encode(samples, [[load_image(sample.images[0])] for sample in samples])
    seeds = range(len(samples))
    done = model.generate(prompts, seeds=seeds, temperature=1.0, max_new_tokens=max_new_tokens)
    return prompts, done


def test_balance_by_hand() -> None:
    # layers 1 and 4 are left out; tokens: sqrt(2 * 8) = 4 and sqrt(1 * 1/4) = 1/2; mean 2.25
    image = [[9.0, 9.0], [0.2, 0.5], [0.8, 0.1], [9.0, 9.0]]
    text = [[1.0, 1.0], [0.1, 0.5], [0.1, 0.4], [1.0, 1.0]]
    assert balance_of(image, text) == pytest.approx(2.25, rel=1e-6)


def test_epsilon_keeps_a_blind_layer_finite() -> None:
    image, text = [[1.0]] * 4, [[1.0]] * 4
    image[1] = [0.0]
    assert balance_of(image, text) == pytest.approx(math.sqrt(1e-8))


def test_two_layers_have_no_inner_one() -> None:
    with pytest.raises(UsageError, match="three layers"):
        balance_of([[1.0], [1.0]], [[1.0], [1.0]])


def test_a_three_layer_model_with_even_attention_gives_the_ratio_of_token_counts(
    random_tiny: Maker, held_out: SampleSet
) -> None:
    """With keys of zero every visible token gets the same attention: rho is known exactly."""
    model = random_tiny(3, 0)
    with torch.no_grad():
        for layer in model.model.model.language_model.layers:
            layer.self_attn.k_proj.weight.zero_()
            layer.self_attn.k_proj.bias.zero_()
    samples = held_out.samples[:6]
    prompts, done = asked(model, samples)
    words = [len(model.tokenizer(sample.question)["input_ids"]) for sample in samples]
    for num_words, found in zip(words, measure_balance(model, samples, prompts, done), strict=True):
        num_text = num_words + 2  # <user> and <ans>
        num_image = build.num_image_tokens(build.TinyConfig())
        assert found.ratios[Variant.SUM] == pytest.approx(num_image / num_text, rel=1e-5)
        assert found.ratios[Variant.MEAN] == pytest.approx(1.0, rel=1e-5)
        assert found.ratios[Variant.SINK_MASKED] == pytest.approx(
            num_image / (num_text - 1), rel=1e-5
        )
        assert found.ratios[Variant.QUESTION_ONLY] == pytest.approx(num_image / num_words, rel=1e-5)


def test_the_paper_s_sum_and_mean_differ_by_the_ratio_of_token_counts(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    """The equation has sums, the caption of Figure 2 and the code have means per token."""
    samples = held_out.samples[:8]
    prompts, done = asked(tiny, samples)
    sizes_BS = token_sets(tiny, samples, prompts).sum(2).tolist()
    for (image, text, _, _), found in zip(
        sizes_BS, measure_balance(tiny, samples, prompts, done), strict=True
    ):
        factor = found.ratios[Variant.SUM] / found.ratios[Variant.MEAN]
        assert factor == pytest.approx(image / text, rel=1e-4)


def test_a_mean_of_ratios_is_taken_not_a_ratio_of_means() -> None:
    """Over tokens; the released code divides summed means."""
    image, text = [[1.0, 9.0]] * 3, [[1.0, 3.0]] * 3
    assert balance_of(image, text) == pytest.approx((1 / 1 + 9 / 3) / 2)
    assert (1 + 9) / (1 + 3) == 2.5


def test_every_inner_layer_counts_not_one_alone() -> None:
    """The released code reads layer index 20 and no other."""
    image = [[7.0]] + [[2.0]] * 20 + [[32.0]] * 10 + [[7.0]]
    found = balance_of(image, [[1.0]] * 32)
    assert found == pytest.approx(math.exp((20 * math.log(2) + 10 * math.log(32)) / 30))


def test_the_first_generated_token_counts(tiny: LocalModel, held_out: SampleSet) -> None:
    """The released code leaves it out, so that a one-token answer would have no balance."""
    samples = held_out.samples[:4]
    prompts, done = asked(tiny, samples, max_new_tokens=1)
    for found in measure_balance(tiny, samples, prompts, done):
        assert found.num_tokens == 1
        assert found.ratios[Variant.SUM] > 0


def test_text_after_the_picture_counts_as_text(tiny: LocalModel, held_out: SampleSet) -> None:
    """The released code takes what stands before the picture only, which is the template here."""
    samples = held_out.samples[:4]
    prompts, _ = asked(tiny, samples)
    image_BP, text_BP, _, question_BP = token_sets(tiny, samples, prompts).unbind(1)
    last_image_B = image_BP.int().cumsum(1).argmax(1)
    for row, last in enumerate(last_image_B.tolist()):
        assert text_BP[row, last + 1 :].all()
        assert question_BP[row, last + 1 :].any()


def test_streamed_sums_are_those_of_full_attention_maps(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    samples = held_out.samples[:10]
    prompts, done = asked(tiny, samples)
    found = measure_balance(tiny, samples, prompts, done)
    sets = token_sets(tiny, samples, prompts)
    for row, sample in enumerate(samples):
        picture = [[load_image(sample.images[0])]]
        alone = tiny.encode([sample], picture)
        length, prompt = int(done.lengths_B[row]), alone.inputs["input_ids"].shape[1]
        ids = torch.cat([alone.inputs["input_ids"], done.token_ids_BT[row : row + 1, :-1]], dim=1)
        tiny.model.set_attn_implementation("eager")
        with torch.no_grad():
            maps = tiny.model(
                input_ids=ids,
                pixel_values=alone.inputs["pixel_values"],
                output_attentions=True,
            ).attentions
        tiny.model.set_attn_implementation("sdpa")
        rows_LTP = torch.stack(maps)[:, 0].mean(1)[:, prompt - 1 : prompt - 1 + length, :prompt]
        real = prompts.inputs["attention_mask"][row].bool()
        image, text, sink, question = (one[real] for one in sets[row])
        by_hand = {
            Variant.SUM: (image, text),
            Variant.SINK_MASKED: (image, text & ~sink),
            Variant.QUESTION_ONLY: (image, question),
        }
        for variant, (over, under) in by_hand.items():
            expected = balance_of(
                (rows_LTP * over).sum(2).tolist(), (rows_LTP * under).sum(2).tolist()
            )
            assert found[row].ratios[variant] == pytest.approx(expected, rel=1e-4)


def test_question_tokens_are_found_inside_the_template(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    samples = held_out.samples[:8]
    prompts, _ = asked(tiny, samples)
    for row, question_P in enumerate(token_sets(tiny, samples, prompts)[:, 3]):
        ids = prompts.inputs["input_ids"][row][question_P]
        assert tiny.tokenizer.decode(ids) == samples[row].question


def test_measuring_leaves_the_model_as_it_was(tiny: LocalModel, held_out: SampleSet) -> None:
    samples = held_out.samples[:3]
    before = tiny.model.config.text_config._attn_implementation
    prompts, done = asked(tiny, samples)
    measure_balance(tiny, samples, prompts, done)
    assert tiny.model.config.text_config._attn_implementation == before
    assert asked(tiny, samples)[1].texts == done.texts


def test_a_model_whose_attention_cannot_be_had_is_refused_loudly(
    random_tiny: Maker, held_out: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_tiny(3, 0)
    prompts, done = asked(model, held_out.samples[:2])
    before = model.model.config.text_config._attn_implementation
    with monkeypatch.context() as patched:
        patched.setattr(model.model, "set_attn_implementation", lambda _: None)
        with pytest.raises(StateError, match="does not let its attention be read"):
            measure_balance(model, held_out.samples[:2], prompts, done)

    first = model.model.model.language_model.layers[0]
    with monkeypatch.context() as patched:
        patched.setattr(
            first.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
        )
        with pytest.raises(StateError, match="2 of 3 layers"):
            measure_balance(model, held_out.samples[:2], prompts, done)
    assert model.model.config.text_config._attn_implementation == before


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0
        self.maps = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
            if result.dim() == 4 and result.shape[2] == result.shape[3] > 16:
                self.maps += result.dtype.is_floating_point
        return result


@contextmanager
def watched() -> Iterator[_Largest]:
    with _Largest() as mode:
        yield mode


def test_no_full_map_is_made_and_chunks_stay_bounded(
    random_tiny: Maker, held_out: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one layer takes is the most: neither layers nor the answer's length add to it."""
    samples = held_out.samples[:2]
    largest = {}
    monkeypatch.setattr(cmab, "_CHUNK_ELEMENTS", 2 * 4 * 120 * 4)
    for layers in (3, 9):
        model = random_tiny(layers, 0)
        monkeypatch.setattr(type(model), "end_token_ids", lambda _: (-1,))  # long answers
        for length in (10, 60):
            prompts, done = asked(model, samples, max_new_tokens=length)
            inside: list[int] = []
            original = cmab._sums

            def noted(*args: object, into: list[int] = inside, inner: object = original) -> object:
                with watched() as mode:
                    result = inner(*args)  # type: ignore[operator]
                assert mode.maps == 0
                into.append(mode.elements)
                return result

            with monkeypatch.context() as patched:
                patched.setattr(cmab, "_sums", noted)
                measure_balance(model, samples, prompts, done)
            assert len(inside) == layers
            largest[layers, length] = max(inside)
    assert largest[3, 10] == largest[9, 10]
    assert largest[3, 60] == largest[9, 60]
    bound = max(2 * 4 * 120 * 4, 2 * 120 * 96)  # a chunk, or the keys themselves
    assert max(largest.values()) <= bound


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes that torch held at once in a call, kernels' own workspace included."""
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


def long_answers(layers: int, length: int) -> tuple[LocalModel, list[Sample], Prompts, Completions]:
    """A random LLaVA with 400 image tokens a prompt, and answers of random words."""
    config = build.TinyConfig(image_side=80, patch_side=4, layers=layers, vision_layers=1)
    model = LocalModel(build.build_model(config, seed=0), build.build_processor(config))
    sample = Sample(id="a", question="what is the left digit ?", answer="1", images=(Path("a"),))
    prompts = model.encode([sample] * 2, [[Image.new("RGB", (80, 80), "red")]] * 2)
    rng = torch.Generator().manual_seed(0)
    done = Completions(
        token_ids_BT=torch.randint(10, 40, (2, length), generator=rng),
        lengths_B=torch.full((2,), length),
        logprobs_BT=torch.zeros(2, length),
        finished_B=torch.ones(2, dtype=torch.bool),
        texts=("", ""),
    )
    return model, [sample] * 2, prompts, done


@torch.no_grad()
def forward(model: LocalModel, inputs: Mapping[str, torch.Tensor], *, maps: bool = False) -> None:
    model.model(**inputs, use_cache=False, output_attentions=maps)


def test_peak_memory_grows_neither_with_layers_nor_with_the_answer() -> None:
    """Above a plain pass over the same tokens, by all of torch's allocations; maps beside it."""
    extra, maps = {}, {}
    for layers in (4, 12):
        for length in (8, 64):
            model, samples, prompts, done = long_answers(layers, length)
            inputs = append_tokens(prompts, done.token_ids_BT[:, :-1], done.lengths_B).inputs
            plain = peak_bytes(partial(forward, model, inputs))
            streamed = peak_bytes(partial(measure_balance, model, samples, prompts, done))
            extra[layers, length] = streamed - plain
            model.model.set_attn_implementation("eager")
            maps[layers, length] = peak_bytes(partial(forward, model, inputs, maps=True)) - plain
    kept = 12 * 2 * 64 * 4 * 4  # four float32 sums a layer, row and token
    assert max(extra.values()) <= min(extra.values()) + 4 * kept
    assert max(extra.values()) < 1 << 20
    assert min(maps.values()) > 10 << 20
    assert maps[12, 64] > 2 * maps[4, 64]  # what a method that keeps maps looks like


@pytest.mark.parametrize(
    ("ratio", "stratum"),
    [
        (0.099, Stratum.EASY),
        (0.1, Stratum.MEDIUM),
        (0.399, Stratum.MEDIUM),
        (0.4, Stratum.HARD),
        (1.6, Stratum.HARD),
        (1.601, Stratum.MEDIUM),
        (1.9, Stratum.MEDIUM),
        (1.901, Stratum.EASY),
        (None, Stratum.ERROR),
    ],
)
def test_the_paper_s_limits(ratio: float | None, stratum: Stratum) -> None:
    assert stratum_of(ratio, right=True) is stratum
    assert stratum_of(1.0, right=False) is Stratum.UNSOLVED


def test_quantile_strata_do_not_depend_on_the_scale() -> None:
    ratios: list[float | None] = [1.1**power for power in range(-15, 16)]
    right = [True] * 31
    strata = quantile_strata(ratios, right)
    assert strata == quantile_strata([16 * ratio for ratio in ratios if ratio], right)
    assert strata[15] is Stratum.HARD
    assert strata[0] is strata[30] is Stratum.EASY
    counts = [strata.count(one) for one in (Stratum.EASY, Stratum.MEDIUM, Stratum.HARD)]
    assert max(counts) - min(counts) <= 2
    mixed = quantile_strata([1.0, None, 2.0], [True, True, False])
    assert mixed == (Stratum.HARD, Stratum.ERROR, Stratum.UNSOLVED)
