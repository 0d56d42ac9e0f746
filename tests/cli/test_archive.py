"""`tierwise archive`: each verb, as text and as JSON, and what bad input looks like."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierwise.cli.main import run


@pytest.fixture(scope="module")
def vault() -> Iterator[Path]:
    """An archive with a few files on discs and one in the buffer."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tierwise-cli-", dir=memory))
    source = folder / "source"
    (source / "notes").mkdir(parents=True)
    for number in range(12):
        (source / "notes" / f"{number}.txt").write_text(f"note {number}\n" * 200)
    root = folder / "vault"
    made = ["archive", "init", str(root), "--disc", "2MiB", "--array", "2+1", "--slots", "30",
            "--forepart", "16"]  # fmt: skip
    for args in (
        made,
        ["archive", "import", str(root), str(source), "kept"],
        ["archive", "seal", str(root), "--partial"],
        ["archive", "burn", str(root), "--partial"],
        ["archive", "evict", str(root)],
    ):
        assert run(args) == 0
    yield root
    shutil.rmtree(folder)


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    capsys.readouterr()
    assert run(["archive", *args, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_every_verb_has_json(
    vault: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(vault)
    assert as_json(capsys, "status", root)["files"] == 12
    entries = as_json(capsys, "ls", root, "kept/notes")["entries"]
    assert isinstance(entries, list)
    assert {row["state"] for row in entries} == {"offline"}
    assert as_json(capsys, "which", root, "kept")["discs"]
    assert as_json(capsys, "versions", root, "kept/notes/1.txt")["versions"]
    assert as_json(capsys, "recall", root, "kept/notes/1.txt")["files"] == 1
    assert as_json(capsys, "evict", root, "kept/notes/1.txt")["files"] == 1
    request = as_json(capsys, "recall", root, "kept/notes", "--prepare")["request"]
    served = as_json(capsys, "requests", root, "--serve")
    assert served["files"] == 12
    assert as_json(capsys, "requests", root, "--release", str(request))["requests"] == []
    assert as_json(capsys, "seal", root)["images"] == []
    assert as_json(capsys, "burn", root)["discs"] == 0
    assert as_json(capsys, "scrub", root)["failed"] == []
    assert as_json(capsys, "repair", root)["repaired"] == []
    assert as_json(capsys, "verify", root)["problems"] == []
    assert as_json(capsys, "fsck", root)["problems"] == []
    assert as_json(capsys, "events", root)["events"]
    bag = tmp_path / "bag"
    assert as_json(capsys, "export", root, "kept", "--to", str(bag), "--bagit")["files"] == 12
    checked = subprocess.run(
        ["sha256sum", "--check", "--quiet", "manifest-sha256.txt"], cwd=bag, check=False
    )
    assert checked.returncode == 0
    assert (bag / "bagit.txt").read_text().startswith("BagIt-Version: 1.0\n")


def test_the_inventory_is_what_the_cost_model_reads(
    vault: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tierwise.tco.scenario import read_inventory

    target = tmp_path / "inventory.json"
    assert run(["archive", "inventory", str(vault), "-o", str(target)]) == 0
    assert read_inventory(target).num_files == 12
    row = json.loads(target.read_text())
    documented = (Path(__file__).parents[2] / "docs/formats/inventory.md").read_text()
    assert [key for key in row if f"`{key}`" not in documented] == []


def test_text_is_for_people(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["archive", "evict", str(vault)]) == 0
    assert run(["archive", "ls", "-D", str(vault), "kept/notes"]) == 0
    assert "2.txt  TW_" in capsys.readouterr().out
    assert run(["archive", "recall", str(vault), "kept", "--dry-run"]) == 0
    assert "slot" in capsys.readouterr().out
    assert run(["archive", "status", str(vault)]) == 0
    said = capsys.readouterr().out
    assert "offline" in said
    assert "{" not in said


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["status", "/nowhere"], 6, "no archive in /nowhere"),
        (["init", "VAULT"], 10, "holds an archive already"),
        (["init", "NEW", "--disc", "cd-9"], 4, "no disc type"),
        (["init", "NEW", "--disc", "1000"], 4, "too small"),
        (["init", "NEW", "--disc", "1MiB", "--array", "2+1"], 4, "too small for an image"),
        (["init", "NEW", "--array", "ten"], 4, "not an array"),
        (["init", "NEW", "--array", "10+9"], 4, "not possible"),
        (["init", "NEW", "--slots", "5"], 4, "does not fit a library"),
        (["ls", "VAULT", "nothing"], 6, "nothing named nothing"),
        (["which", "VAULT", "nothing"], 6, "nothing named"),
        (["requests", "VAULT", "--cancel", "77"], 6, "no recall request 77"),
        (["export", "VAULT", "kept", "--to", "VAULT"], 10, "not empty"),
        (["export", "VAULT", "kept/notes/1.txt", "--to", "NEW", "--version", "9"], 6, "version 9"),
        (["rebuild", "VAULT"], 10, "has a catalogue"),
        (["import", "VAULT", "/nowhere"], 6, "no folder /nowhere"),
        (["mount", "VAULT", "/nowhere"], 6, "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(  # noqa: PLR0917 - fixtures come by name
    vault: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    words: str,
) -> None:
    names = {"VAULT": str(vault), "NEW": str(tmp_path / "new")}
    capsys.readouterr()
    assert run(["archive", *(names.get(arg, arg) for arg in args)]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "new" / "archive.toml").exists()


def test_a_lost_disc_is_seen_in_the_exit_code(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = vault.with_name("copy")
    shutil.copytree(vault, copy)
    disc = next(copy.glob("library/roller-*/layer-*/tray-*/disc-*.img"))
    disc.unlink()
    assert run(["archive", "scrub", str(copy)]) == 9
    assert run(["archive", "verify", str(copy)]) == 9
    assert run(["archive", "repair", str(copy)]) == 0
    assert run(["archive", "scrub", str(copy)]) == 0


def test_a_damaged_catalogue_says_what_to_do(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = vault.with_name("damaged")
    shutil.copytree(vault, copy)
    (copy / "metadata" / "catalogue.db").write_bytes(b"not a database" * 1000)
    capsys.readouterr()
    assert run(["archive", "status", str(copy)]) == 5
    assert "rebuild" in capsys.readouterr().err


def test_the_archive_loads_no_torch() -> None:
    code = (
        "import sys, tierwise.archive.vault, tierwise.cli.archive;"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_library_may_stand_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, discs = tmp_path / "vault", tmp_path / "elsewhere" / "discs"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("keep me\n" * 500)
    made = ["archive", "init", str(root), "--disc-size", "2MiB", "--array", "2+1", "--slots", "9",
            "--forepart", "16", "--library", str(discs)]  # fmt: skip
    # an init that was cut off after it had made the library is taken up again
    root.mkdir()
    (root / "init.unfinished").touch()
    discs.mkdir(parents=True)
    (discs / "geometry.json").touch()
    assert run(made) == 0
    for args in (
        ["import", str(root), str(tmp_path / "notes"), "kept"],
        ["seal", str(root), "--partial"],
        ["burn", str(root), "--partial"],
        ["evict", str(root)],
    ):
        assert run(["archive", *args]) == 0
    assert not (root / "library").exists()
    assert list(discs.rglob("disc-*.img"))
    assert as_json(capsys, "recall", str(root), "kept/note.txt")["files"] == 1
    assert (
        run(["archive", "export", str(root), "kept/note.txt", "--to", str(tmp_path / "back")]) == 0
    )
    (back,) = (tmp_path / "back").rglob("note.txt")
    assert back.read_text() == "keep me\n" * 500


@pytest.mark.parametrize(
    ("library", "says"), [("full", "is not empty"), (".", "would hold the archive itself")]
)
def test_a_library_is_not_made_among_other_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: str, says: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "geometry.json").write_text("somebody's")
    root = tmp_path / "vault"
    args = ["archive", "init", str(root), "--library", str(tmp_path / library)]
    assert run([*args, "--disc", "2MiB", "--array", "2+1", "--slots", "9"]) == 10
    assert says in capsys.readouterr().err
    assert not root.exists()
    assert (tmp_path / "full" / "geometry.json").read_text() == "somebody's"
