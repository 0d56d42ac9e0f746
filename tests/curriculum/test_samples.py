from __future__ import annotations

import os
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tierwise.core.errors import DataError, MissingFileError
from tierwise.curriculum.samples import (
    BadImageError,
    ImageFault,
    image_digest,
    load_image,
    make_sample,
    read_samples,
)

Writer = Callable[[Sequence[str]], Path]
GOOD = '{"id": "a", "question": "q ?", "answer": "1", "images": ["good.png"], "task": "count"}'


def test_a_row_becomes_a_sample_with_paths_beside_its_file(write_rows: Writer) -> None:
    path = write_rows([GOOD])
    (sample,) = read_samples(path).samples
    assert (sample.id, sample.question, sample.answer, sample.task) == ("a", "q ?", "1", "count")
    assert sample.images == (path.parent / "good.png",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"answer": "1"}', "no question"),
        ('{"question": "  ", "answer": "1"}', "question is empty"),
        ('{"question": "q"}', "no answer"),
        ('{"question": "q", "answer": [1]}', "answer is not text"),
        ('{"question": "q", "answer": "1", "images": [3]}', "images is not a list of paths"),
        ('{"question": "<image> q", "answer": "1"}', "1 <image> tags for 0 images"),
        (
            '{"question": "<image><image> q", "answer": "1", "images": ["good.png"]}',
            "2 <image> tags for 1 images",
        ),
        ('{"question": "<image>", "answer": "1", "images": ["good.png"]}', "question is empty"),
        ('{"id": true, "question": "q", "answer": "1"}', "id is neither"),
        ('{"question": "q", "answer": NaN}', "answer is not text"),
        ('{"question": "q", "answer": 1e999}', "answer is not text"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "not JSON"),
        ('{"question": "q", "answer": "1", "x": ' + "[" * 100_000 + "}", "not JSON: nested"),
        ('{"question": "\\ud800 q", "answer": "1"}', "not UTF-8 text"),
        ('{"question": "q", "answer": "\\udcff"}', "not UTF-8 text"),
        ('{"id": "\\ud800", "question": "q", "answer": "1"}', "not UTF-8 text"),
        ('{"task": "\\ud800", "question": "q", "answer": "1"}', "not UTF-8 text"),
        ('{"question": "q", "answer": "1", "images": ["\\ud800.png"]}', "not UTF-8 text"),
        ('{"question": "q", "answer": "1", "images": ["a\\u0000.png"]}', "no file name"),
        (GOOD, "id 'a' was used before"),
    ],
)
def test_a_malformed_row_names_file_and_line_or_is_counted(
    write_rows: Writer, line: str, reason: str
) -> None:
    path = write_rows([GOOD, "", line])
    with pytest.raises(DataError, match=reason) as caught:
        read_samples(path)
    assert caught.value.message.startswith(f"{path}:3: ")
    kept = read_samples(path, skip_bad=True)
    assert [sample.id for sample in kept.samples] == ["a"]
    assert [row.place for row in kept.skipped] == [f"{path}:3"]


def test_bytes_that_are_not_utf8_are_a_bad_row(write_rows: Writer) -> None:
    path = write_rows([GOOD])
    path.write_bytes(path.read_bytes() + b'{"question": "\xff", "answer": "1"}\n')
    assert [row.reason for row in read_samples(path, skip_bad=True).skipped] == ["not UTF-8 text"]


def test_a_mark_of_byte_order_is_no_part_of_the_first_row(write_rows: Writer) -> None:
    path = write_rows([GOOD])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_samples(path).samples[0].id == "a"


def test_a_file_without_a_usable_row_and_a_missing_file(write_rows: Writer) -> None:
    with pytest.raises(DataError, match="no usable sample"):
        read_samples(write_rows(["{"]), skip_bad=True)
    with pytest.raises(MissingFileError):
        read_samples(Path("/nowhere/rows.jsonl"))


def test_ids_follow_content_and_not_the_picture_s_name(tmp_path: Path) -> None:
    def identity(name: str, colour: int, answer: str = "1") -> str:
        path = tmp_path / name
        Image.new("RGB", (4, 4), (colour, 0, 0)).save(path)
        return make_sample(question="q", answer=answer, images=(path,)).id

    assert identity("x.png", 5) == identity("y.png", 5)
    assert len({identity("x.png", 5), identity("z.png", 6), identity("x.png", 5, "2")}) == 3


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _huge_png(width: int) -> bytes:
    header = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0))
    body = _png_chunk(b"IDAT", zlib.compress(bytes(width + 1)))
    return b"\x89PNG\r\n\x1a\n" + header + body + _png_chunk(b"IEND", b"")


def _deep_rgb_png() -> bytes:
    header = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    body = _png_chunk(b"IDAT", zlib.compress(bytes(13)))
    return b"\x89PNG\r\n\x1a\n" + header + body + _png_chunk(b"IEND", b"")


def _bad_picture(fault: ImageFault, path: Path) -> Path:
    plain = Image.fromarray(np.arange(48 * 48 * 3, dtype=np.uint8).reshape(48, 48, 3))
    match fault:
        case ImageFault.EMPTY:
            path.write_bytes(b"")
        case ImageFault.UNREADABLE:
            path.write_bytes(b"this is no picture")
        case ImageFault.TRUNCATED:
            plain.save(path, format="JPEG")
            path.write_bytes(path.read_bytes()[:-200])
        case ImageFault.ANIMATED:
            plain.save(path, format="GIF", save_all=True, append_images=[plain.rotate(90)])
        case ImageFault.DEEP:
            Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(path, format="PNG")
        case ImageFault.CMYK:
            plain.convert("CMYK").save(path, format="JPEG")
        case ImageFault.ROTATED:
            exif = Image.Exif()
            exif[0x0112] = 6
            plain.save(path, format="JPEG", exif=exif)
        case ImageFault.HUGE:
            path.write_bytes(_huge_png(20_001))
        case ImageFault.MISSING:
            pass
    return path


@pytest.mark.parametrize("fault", list(ImageFault))
def test_each_bad_picture_has_its_class(fault: ImageFault, tmp_path: Path) -> None:
    with pytest.raises(BadImageError) as caught:
        load_image(_bad_picture(fault, tmp_path / "picture"))
    assert caught.value.fault is fault
    assert pickle.loads(pickle.dumps(caught.value)).fault is fault


def test_a_picture_cut_anywhere_is_a_bad_picture(tmp_path: Path) -> None:
    """Pillow decodes a PNG, and may fail, as soon as it is asked for EXIF or frames."""
    plain = Image.fromarray(np.arange(48 * 48 * 3, dtype=np.uint8).reshape(48, 48, 3))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        whole = tmp_path / "whole"
        plain.save(whole, format=kind)
        data = whole.read_bytes()
        for length in (*range(1, 200, 7), len(data) // 2):
            (tmp_path / "cut").write_bytes(data[:length])
            with pytest.raises(BadImageError) as caught:
                load_image(tmp_path / "cut")
            assert caught.value.fault in (ImageFault.TRUNCATED, ImageFault.UNREADABLE)


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever for somebody to write into it."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "circle.png").symlink_to("circle.png")
    for name in ("pipe.png", "folder.png", "circle.png", "x" * 300 + ".png"):
        assert image_digest(tmp_path / name) == f"unreadable:{name}"
        with pytest.raises(BadImageError) as caught:
            load_image(tmp_path / name)
        assert caught.value.fault in (ImageFault.UNREADABLE, ImageFault.MISSING)


def test_sixteen_bit_colour_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "deep.png").write_bytes(_deep_rgb_png())
    with pytest.raises(BadImageError) as caught:
        load_image(tmp_path / "deep.png")
    assert caught.value.fault is ImageFault.DEEP


def test_good_pictures_become_rgb(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(_huge_png(20_000))
    assert load_image(tmp_path / "wide.png").size == (20_000, 1)
    for mode in ("RGB", "RGBA", "L", "P", "1"):
        Image.new(mode, (5, 4)).save(tmp_path / "x.png")
        assert load_image(tmp_path / "x.png").mode == "RGB"
    exif = Image.Exif()
    exif[0x0112] = 1
    Image.new("RGB", (5, 4)).save(tmp_path / "upright.jpg", exif=exif)
    assert load_image(tmp_path / "upright.jpg").size == (5, 4)
