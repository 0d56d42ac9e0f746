"""Files are whole or absent; events are the same but for `timing`; JSONL errors have lines."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.core.errors import DataError, MissingFileError, StorageFullError
from tierwise.core.records import RunRecord, read_jsonl, whole_file, write_manifest, write_whole


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_whole(target, "old")

    def fail_half_way() -> None:
        with whole_file(target) as part:
            part.write_text("ne")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail_half_way()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFullError, match="no space left while writing"):
        write_whole(tmp_path / "a.txt", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_file_system_is_one_sentence_and_leaves_nothing() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    code = (
        "from pathlib import Path\nfrom tierwise.core.records import whole_file\n"
        "with whole_file(Path('/tmp/tierwise-full-test')) as part:\n"
        "    part.symlink_to('/dev/full')\n    part.write_bytes(b'x' * 4096)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StorageFullError: no space left" in done.stderr
    assert not Path("/tmp/tierwise-full-test").exists()


def test_events_are_the_same_but_for_timing(tmp_path: Path) -> None:
    for name, start in (("a", 0.0), ("b", 1e9)):
        record = RunRecord(tmp_path / name, clock=lambda start=start: start)  # type: ignore[misc]
        record.event("score", num_samples=3, mean=0.25, timing={"seconds": start})
        record.event("done")
    first, second = (RunRecord(tmp_path / name, clock=float).events() for name in ("a", "b"))
    assert first != second
    for event in first + second:
        assert set(event.pop("timing")) <= {"time", "seconds"}
    assert (
        first == second == [{"event": "score", "num_samples": 3, "mean": 0.25}, {"event": "done"}]
    )


def test_a_torn_last_line_is_left_out_and_truncate_keeps_the_first(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, clock=float)
    for step in range(3):
        record.event("step", step=step)
    with record.path.open("a") as stream:
        stream.write('{"event": "st')
    assert [event["step"] for event in record.events()] == [0, 1, 2]
    record.truncate(1)
    record.event("step", step=9)
    assert [event["step"] for event in record.events()] == [0, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a":\n', ":2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', ":3: not a JSON object"),
        (b'{"a": 1}\n\xff\n', "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_jsonl_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"none\.jsonl"):
        list(read_jsonl(tmp_path / "none.jsonl"))


def test_the_manifest_says_what_ran(tmp_path: Path) -> None:
    write_manifest(tmp_path, seed=1, versions={"b": "2", "a": "1"}, commit=None, inputs={"x": "ff"})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"] == {"a": "1", "b": "2"}
    assert manifest["inputs_sha256"] == {"x": "ff"}
    assert manifest["seed"] == 1
