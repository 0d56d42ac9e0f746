"""The systemd unit, the mount helper and the fstab line of docs/fuse.md, as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount
from tierwise.archive.vault import Archive

PAGE = (Path(__file__).parents[3] / "docs" / "fuse.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(start: str) -> str:
    return next(text for text in BLOCKS if text.startswith(start))


def put_tierwise(folder: Path) -> Path:
    """Make a program `tierwise` that runs these sources."""
    folder.mkdir()
    program = folder / "tierwise"
    sources = Path(__file__).parents[3] / "src"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={sources} exec {sys.executable} -m tierwise "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = put_tierwise(tmp_path / "bin")
    unit = tmp_path / "tierwise-vault.service"
    text = block("[Unit]")
    assert "ExecStart=/usr/local/bin/tierwise archive mount" in text
    unit.write_text(text.replace("/usr/local/bin/tierwise", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    unit.write_text(text.replace("ExecStart", "ExecStrat"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "ExecStrat" in done.stderr, "systemd-analyze would not have noticed"


@pytest.fixture
def places(fast_path: Path) -> tuple[Path, Path, Path]:
    """Return (archive, mount point, helper)."""
    root, mountpoint, helper = fast_path / "v", fast_path / "mnt", fast_path / "helper"
    mountpoint.mkdir()
    Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, library_slots=20
    ).close()
    helper.write_text(block("#!/bin/sh"))
    helper.chmod(0o755)
    return root, mountpoint, helper


def wait_until_let_go(root: Path) -> None:
    """Return when the server behind a mount has ended."""
    for _ in range(200):
        try:
            Archive.open(root).close()
        except RuntimeError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server goes on after umount")


@pytest.mark.fuse
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
def test_the_mount_helper(fast_path: Path, places: tuple[Path, Path, Path]) -> None:
    root, mountpoint, helper = places
    folder = put_tierwise(fast_path / "bin").parent
    helper.write_text(helper.read_text().replace("PATH=", f"PATH={folder}:"))
    command = [str(helper), str(root), str(mountpoint), "-o", "rw"]
    subprocess.run(command, check=True, timeout=60)
    assert mountpoint.is_mount()
    (mountpoint / "f").write_text("hello")
    subprocess.run(["umount", str(mountpoint)], check=True)
    wait_until_let_go(root)
    command[1] = str(fast_path / "nowhere")
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 32
    assert "no archive in" in done.stderr


@pytest.mark.fuse
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount by fstab")
def test_the_line_in_fstab(fast_path: Path, places: tuple[Path, Path, Path]) -> None:
    """mount(8) itself, in a mount namespace whose /sbin and /usr/local/bin have what they need."""
    root, mountpoint, helper = places
    program = put_tierwise(fast_path / "bin")
    for name in ("sbin", "local"):
        for part in ("upper", "work"):
            (fast_path / name / part).mkdir(parents=True)
    shutil.copy(helper, fast_path / "sbin/upper/mount.fuse.tierwise")
    shutil.copy(program, fast_path / "local/upper/tierwise")
    line = next(text for text in BLOCKS if "fuse.tierwise  nofail" in text)
    fstab = fast_path / "fstab"
    fstab.write_text(line.replace("/srv/vault", str(root)).replace("/mnt/vault", str(mountpoint)))

    def overlay(name: str, folder: str) -> str:
        base = fast_path / name
        return (
            f"mount -t overlay overlay -o lowerdir={folder},upperdir={base}/upper,"
            f"workdir={base}/work {folder} || exit 77\n"
        )

    script = (
        overlay("sbin", "/usr/sbin") + overlay("local", "/usr/local/bin") + "set -e\n"
        f"mount -T {fstab} {mountpoint}\necho by fstab > {mountpoint}/f\numount {mountpoint}\n"
        f"until mount -t fuse.tierwise {root} {mountpoint} 2>/dev/null; do sleep 0.2; done\n"
        f"cat {mountpoint}/f\numount {mountpoint}\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces or overlays here")
    assert (done.returncode, done.stdout) == (0, "by fstab\n"), done.stderr
    wait_until_let_go(root)
