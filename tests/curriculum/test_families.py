"""Every probe on random models of other families, saved to and loaded from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tierwise.core.errors import DataError
from tierwise.curriculum.difficulty.balance import Variant, balance_of
from tierwise.curriculum.difficulty.cmab import measure_balance, token_sets
from tierwise.curriculum.difficulty.probes import Sampling
from tierwise.curriculum.difficulty.rscore import Tree
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.models import LocalModel, Prompts, append_tokens
from tierwise.curriculum.samples import Sample, SampleSet, load_image
from tierwise.curriculum.tiny import build

QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
QWEN_TEMPLATE = (
    "{% for message in messages %}<user>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<ans>{% endif %}"
)


def qwen_tokenizer() -> Any:
    tokenizer: Any = build.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_TOKENS})
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def token_settings(tokenizer: Any) -> dict[str, int]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(QWEN_TOKENS), strict=True))


def text_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 2, 2],
        },
    }


def qwen2_vl(kit: Any, tokenizer: Any) -> Any:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 48, "patch_size": 8}
    return kit.Qwen2VLForConditionalGeneration(
        kit.Qwen2VLConfig(
            text_config=text_settings(tokenizer),
            vision_config=vision,
            **token_settings(tokenizer),
        )
    )


def qwen2_5_vl(kit: Any, tokenizer: Any) -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    return kit.Qwen2_5_VLForConditionalGeneration(
        kit.Qwen2_5_VLConfig(
            text_config=text_settings(tokenizer),
            vision_config=vision,
            **token_settings(tokenizer),
        )
    )


def qwen3_vl(kit: Any, tokenizer: Any) -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": 8,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return kit.Qwen3VLForConditionalGeneration(
        kit.Qwen3VLConfig(
            text_config={**text_settings(tokenizer), "head_dim": 12},
            vision_config=vision,
            **token_settings(tokenizer),
        )
    )


def save_qwen(make: Callable[[Any, Any], Any], folder: Path) -> None:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images: Any = Qwen2VLImageProcessorPil
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    make(transformers, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 256, "longest_edge": 48 * 48}
    images(patch_size=8, merge_size=2, size=size).save_pretrained(folder)


@pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, qwen3_vl])
def test_a_qwen_family_runs_every_probe(
    make: Callable[[Any, Any], Any], held_out: SampleSet, tmp_path: Path
) -> None:
    save_qwen(make, tmp_path / "model")
    check_probes(LocalModel.load(tmp_path / "model"), held_out, tmp_path / "out")


def check_probes(
    model: LocalModel, held_out: SampleSet, folder: Path, *, num_image_tokens: int = 9
) -> None:
    config = ScoreConfig(
        num_attempts=1,
        permilles=(0, 500),
        rscore=True,
        tree=Tree(branches=2, depth=2, interval=2),
        sampling=Sampling(batch_size=8, max_new_tokens=4),
    )
    samples = held_out.samples[:5]
    found = score(samples, model, config=config, folder=folder, seed=0)
    assert [row.error for row in found.rows] == [""] * 5
    for row in found.rows:
        assert row.cmab_sum is not None
        assert row.cmab_mean is not None
        assert row.cmab_sink_masked is not None
        assert row.cmab_question_only is not None
        assert row.cmab_sum > 0
        assert row.pass_rate is not None
        assert row.grey_rate is not None
        assert row.blind_rate is not None
        assert row.curve_permilles == (0, 500)
        assert None not in row.curve_rates
        assert row.r_score is not None
        assert 2 <= row.tree_leaves <= 4

    prompts = model.encode(samples, [[load_image(one.images[0])] for one in samples])
    images = torch.tensor(model.image_token_ids())
    per_row = torch.isin(prompts.inputs["input_ids"], images).sum(1)
    # 48 pixels: 6 x 6 patches, merged by 2 x 2 in most families
    assert per_row.tolist() == [num_image_tokens] * 5
    check_balance(model, samples, prompts)


def check_balance(model: LocalModel, samples: Sequence[Sample], prompts: Prompts) -> None:
    """What is streamed is what the family's own eager attention says, scale and window included."""
    done = model.generate(prompts, seeds=range(5), temperature=1.0, max_new_tokens=6)
    found = measure_balance(model, samples, prompts, done)
    sets_BSP = token_sets(model, samples, prompts)
    inputs = append_tokens(prompts, done.token_ids_BT[:, :-1], done.lengths_B).inputs
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model.model(**inputs, use_cache=False, output_attentions=True).attentions
    model.model.set_attn_implementation("sdpa")
    length = sets_BSP.shape[2]
    rows_LBTP = torch.stack(maps).mean(2)[:, :, length - 1 :, :length]
    for row, one in enumerate(found):
        image, text, _, _ = (
            (rows_LBTP[:, row, : one.num_tokens] * member).sum(2).tolist()
            for member in sets_BSP[row]
        )
        assert one.ratios[Variant.SUM] == pytest.approx(balance_of(image, text), rel=1e-3)


GEMMA_TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}


def save_gemma3(folder: Path) -> None:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    kit: Any = transformers
    images: Any = Gemma3ImageProcessorPil
    words: Any = build.build_tokenizer()
    words.add_special_tokens({"additional_special_tokens": list(GEMMA_TOKENS.values())})
    tokenizer = kit.PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        extra_special_tokens=GEMMA_TOKENS,
    )
    ids = dict(
        zip(GEMMA_TOKENS, tokenizer.convert_tokens_to_ids(list(GEMMA_TOKENS.values())), strict=True)
    )
    text = {**text_settings(tokenizer), "head_dim": 12, "sliding_window": 64}
    text.pop("rope_parameters")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 8,
    }
    torch.manual_seed(0)
    kit.Gemma3ForConditionalGeneration(
        kit.Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=9,
            image_token_index=ids["image_token"],
            boi_token_index=ids["boi_token"],
            eoi_token_index=ids["eoi_token"],
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    template = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<boi>")
    kit.Gemma3Processor(
        images(size={"height": 48, "width": 48}),
        tokenizer,
        chat_template=template,
        image_seq_length=9,
    ).save_pretrained(folder)


def test_gemma3_runs_every_probe(held_out: SampleSet, tmp_path: Path) -> None:
    save_gemma3(tmp_path / "model")
    check_probes(LocalModel.load(tmp_path / "model"), held_out, tmp_path / "out")


def save_internvl(folder: Path) -> None:
    import transformers
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    kit: Any = transformers
    images: Any = GotOcr2ImageProcessorPil
    tokenizer: Any = build.build_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<img>", "</img>", "<IMG_CONTEXT>"]}
    )
    tokenizer.chat_template = QWEN_TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>"
    )
    text = {**text_settings(tokenizer), "model_type": "qwen2"}
    text.pop("rope_parameters")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [48, 48],
        "patch_size": [8, 8],
    }
    torch.manual_seed(0)
    kit.InternVLForConditionalGeneration(
        kit.InternVLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=9,
            downsample_ratio=0.5,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images(size={"height": 48, "width": 48}, crop_to_patches=False).save_pretrained(folder)


def test_internvl_runs_every_probe(held_out: SampleSet, tmp_path: Path) -> None:
    save_internvl(tmp_path / "model")
    check_probes(LocalModel.load(tmp_path / "model"), held_out, tmp_path / "out")


SMOL_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]
SMOL_TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]


def save_smolvlm(folder: Path, *, split: bool) -> None:
    import transformers
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kit: Any = transformers
    images: Any = SmolVLMImageProcessorPil
    tokenizer: Any = build.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SMOL_TOKENS, *SMOL_TILES]})
    template = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    tokenizer.chat_template = None
    text = {**text_settings(tokenizer), "model_type": "llama"}
    text.pop("rope_parameters")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 8,
    }
    torch.manual_seed(0)
    kit.SmolVLMForConditionalGeneration(
        kit.SmolVLMConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    images(
        size={"longest_edge": 96 if split else 48},
        max_image_size={"longest_edge": 48},
        do_image_splitting=split,
    ).save_pretrained(folder)


@pytest.mark.parametrize("split", [False, True])
def test_smolvlm_runs_every_probe(held_out: SampleSet, tmp_path: Path, split: bool) -> None:
    save_smolvlm(tmp_path / "model", split=split)
    model = LocalModel.load(tmp_path / "model")
    tiles = 5 if split else 1  # two by two and the whole
    check_probes(model, held_out, tmp_path / "out", num_image_tokens=9 * tiles)


def test_smolvlm_prompts_are_those_of_its_own_processor(
    held_out: SampleSet, tmp_path: Path
) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    theirs: Any = get_image_prompt_string
    for split in (False, True):
        save_smolvlm(tmp_path / str(split), split=split)
        model = LocalModel.load(tmp_path / str(split))
        sample = held_out.samples[0]
        prompts = model.encode([sample], [[load_image(sample.images[0])]])
        side = 2 if split else 0
        picture = theirs(side, side, 9, SMOL_TOKENS[1], SMOL_TOKENS[0], SMOL_TOKENS[2])
        expected = model.tokenizer(prompts.texts[0].replace("<image>", picture))["input_ids"]
        assert prompts.inputs["input_ids"][0].tolist() == expected


def test_llava_runs_every_probe(held_out: SampleSet, tmp_path: Path) -> None:
    config = build.TinyConfig(layers=4)
    build.build_model(config, seed=0).save_pretrained(tmp_path / "model")
    build.build_processor(config).save_pretrained(tmp_path / "model")
    model = LocalModel.load(tmp_path / "model")
    side = 48 // config.patch_side
    check_probes(model, held_out, tmp_path / "out", num_image_tokens=side**2)


def test_a_folder_with_a_tokenizer_only_is_refused(tmp_path: Path) -> None:
    config = build.TinyConfig(layers=3)
    build.build_model(config, seed=0).save_pretrained(tmp_path)
    build.build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="processor"):
        LocalModel.load(tmp_path)
