"""Every verb beside a mount, every long verb cut off and run again, and a start with no room."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.vault import Archive, mountable

Make = Callable[..., Archive]
ID = "0123456789abcdef" * 2


class CutOff:
    """A progress display, and crash points, that interrupt at the n-th step of all."""

    def __init__(self) -> None:
        self.left = 0

    def step(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def task(self, label: str, total: float | None) -> Iterator[Any]:
        yield SimpleNamespace(advance=self.step)


def fill(archive: Archive) -> dict[str, str]:
    source, found = random.Random(8), {}
    for number, size in enumerate(
        [0, 1, 2_500_000, *(source.randrange(50_000) for _ in range(20))]
    ):
        data = source.randbytes(size)
        archive.files.write_file(f"d{number % 3}/f{number}", data)
        found[f"d{number % 3}/f{number}"] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_long_verbs_are_cut_off_anywhere_and_run_again(
    make_archive: Make, tmp_path: Path, seed: int
) -> None:
    cut, chance = CutOff(), random.Random(seed)
    archive = make_archive(crash_point=cut.step)
    written = fill(archive)
    progress: Any = cut
    interrupted = set()

    def until_done(name: str, verb: Callable[[], object]) -> None:
        for attempt in range(40):
            cut.left = chance.randrange(1, 4 + 6 * attempt)  # the parity of one array is 70 steps
            try:
                verb()
            except KeyboardInterrupt:
                interrupted.add(name)
                # discs that were destroyed and not yet made anew are all that may be amiss
                assert [text for text in archive.fsck() if "no good disc" not in text] == []
            else:
                return
        pytest.fail(f"{name} never comes to an end")

    until_done("seal", lambda: archive.seal(partial=True, progress=progress))
    until_done("burn", lambda: archive.burn(partial=True, progress=progress))
    until_done("evict", archive.evict)
    for slot in (1, 4):
        archive.shelf.destroy(slot)
    start = archive.clock()
    until_done("scrub", lambda: archive.scrub(older_than_ns=start, progress=progress))
    until_done("repair", lambda: archive.repair(progress=progress))
    until_done("recall", lambda: archive.recall(["d1"], progress=progress))
    cut.left = 0
    assert archive.scrub().failed == ()
    assert archive.verify().problems == ()
    archive.export(["/"], tmp_path / "out")
    copied = {
        path: hashlib.sha256((tmp_path / "out" / path).read_bytes()).hexdigest() for path in written
    }
    assert copied == written
    assert archive.fsck() == []
    assert {"seal", "burn"} <= interrupted


@pytest.mark.fuse
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
def test_every_verb_beside_a_mount(fast_path: Path) -> None:
    from tierwise.cli.main import run

    root, mountpoint = fast_path / "vault", fast_path / "mnt"
    mountpoint.mkdir()
    made = ["init", str(root), "--disc", "2MiB", "--array", "2+1", "--slots", "60"]
    assert run(["archive", *made]) == 0
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        (mount.path / "d").mkdir()
        for number in range(8):
            (mount.path / "d" / f"f{number}").write_bytes(b"%d" % number * 90_000)
        for verb, *args in (
            ["status"], ["ls", "-D", "d"], ["inventory"], ["events"], ["seal", "--partial"],
            ["burn", "--partial"], ["evict"], ["which", "d"], ["versions", "d/f1"],
            ["recall", "d/f1"], ["recall", "d", "--prepare"], ["requests", "--serve"], ["scrub"],
            ["repair"], ["verify"], ["fsck"], ["export", "d", "--to", str(fast_path / "out")],
        ):  # fmt: skip
            flags = [arg for arg in args if arg.startswith("-") and verb == "ls"]
            rest = [arg for arg in args if arg not in flags]
            assert run(["archive", verb, *flags, str(root), *rest]) == 0, verb
            for number in (1, 7):
                found = (mount.path / "d" / f"f{number}").read_bytes()
                assert found == b"%d" % number * 90_000, verb
        assert run(["archive", "import", str(root), str(fast_path / "out"), "in"]) == 10
        assert run(["archive", "rebuild", str(root)]) == 10
        (mount.path / "still").write_text("writable")


def test_a_restart_with_a_full_buffer_opens_and_reads_at_once(fast_path: Path) -> None:
    root = fast_path / "vault"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tierwise.archive.vault import Archive\n"
        f"a = Archive.init(Path(sys.argv[1]), archive_id={ID!r}, disc_size_bytes=2 << 20,\n"
        "                 data_discs=2, parity_discs=1, library_slots=60,\n"
        "                 buffer_size_bytes=1 << 20)\n"
        "a.pause = lambda event, seconds: None\n"
        "try:\n"
        "    for n in range(99):\n"
        "        a.files.write_file(f'f{n}', b'%d' % (n % 10) * 50_000)\n"
        "except OSError:\n"
        "    a.fs.syncfs()\n"
        "    print(n, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    count = int(done.stdout)
    assert count == (1 << 20) // 50_000
    with Archive.open(root) as archive:
        for number in range(count):
            assert archive.files.read_file(f"f{number}") == b"%d" % (number % 10) * 50_000
        with pytest.raises(OSError, match=os.strerror(28)):
            archive.files.write_file("more", b"m" * 50_000)
        archive.seal(partial=True)
        archive.burn(partial=True)
        archive.files.write_file("more", b"m" * 50_000)
        assert archive.fsck() == []


LONG = {
    "import": ["{out}", "in"], "seal": ["--partial"], "burn": ["--partial"], "evict": [],
    "recall": ["d"], "requests": ["--serve"], "scrub": [], "repair": [], "verify": [], "fsck": [],
    "export": ["/", "--to", "{new}"], "rebuild": [],
}  # fmt: skip


def test_every_verb_has_json() -> None:
    from tierwise.cli.archive import group

    for name, command in group.commands.items():
        assert any("--json" in option.opts for option in command.params), name


def test_every_long_verb_says_how_far_it_is(
    fast_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` has the result on standard output and progress, as JSON lines, on the other."""
    from tierwise.cli.main import run

    root = fast_path / "vault"
    (fast_path / "out").mkdir()
    (fast_path / "out" / "f").write_bytes(b"f" * 1000)
    made = ["init", str(root), "--disc", "2MiB", "--array", "2+1", "--slots", "60", "--json"]
    assert run(["archive", *made]) == 0
    with Archive.open(root) as archive:
        archive.files.write_file("d/f", b"1" * 90_000)
    capsys.readouterr()
    for verb, rest in LONG.items():
        if verb == "rebuild":
            (root / "metadata").rename(fast_path / "gone")
        words = [word.format(out=fast_path / "out", new=fast_path / "new") for word in rest]
        assert run(["archive", verb, str(root), *words, "--json"]) == 0, verb
        said = capsys.readouterr()
        assert isinstance(json.loads(said.out), dict), verb
        lines = [json.loads(line) for line in said.err.splitlines()]
        assert any("progress" in line for line in lines), verb
