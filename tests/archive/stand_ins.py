"""Programs that play mtx, xorriso, growisofs and eject on files, for tests of a real library.

A slot is a file `slots/N`, a drive a file `drives/srN`; moving a disc moves the file, and a blank
disc is an empty one. Each call is a line of `calls.jsonl`. As real drives do, the burners pad a
disc. `fail` makes the next burn stop half-way, `hold` makes a drive busy.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = """#!{python} -S
import json, os, pathlib, sys
ROOT = pathlib.Path({root!r})
name, args = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open(ROOT / "calls.jsonl", "a") as log:
    log.write(json.dumps([name, *args]) + "\\n")
loaded = json.loads((ROOT / "loaded.json").read_text())

def leave(words, status):
    sys.stderr.write(words + "\\n")
    sys.exit(status)

def slot(n):
    return ROOT / "slots" / str(n)

def drive(n):
    return ROOT / "drives" / f"sr{{n}}"

def busy(device):
    return (ROOT / "held").exists() and pathlib.Path(device).name == (ROOT / "held").read_text()

def mtx():
    verb, numbers = args[2], [int(a) for a in args[3:]]
    if verb == "status":
        print(f"  Storage Changer {{args[1]}}:{drives} Drives, {slots} Slots ( 0 Import/Export )")
        for n in range({drives}):
            source = loaded.get(str(n))
            print(f"Data Transfer Element {{n}}:" + (
                "Empty" if source is None else f"Full (Storage Element {{source}} Loaded)"))
        for n in range(1, {slots} + 1):
            print(f"      Storage Element {{n}}:" + ("Full" if slot(n).exists() else "Empty"))
        return
    where, n = numbers
    if verb == "load":
        if str(n) in loaded or not slot(where).exists():
            leave(f"source Element Address {{where}} is Empty", 1)
        slot(where).rename(drive(n))
        loaded[str(n)] = where
    else:
        drive(n).rename(slot(where))
        del loaded[str(n)]
    (ROOT / "loaded.json").write_text(json.dumps(loaded))

def toc(device):
    if busy(device):
        leave(f"libburn : SORRY : Cannot open busy device '{{device}}'", 5)
    disc = pathlib.Path(device)
    print(f"Drive current: -outdev '{{device}}'")
    if not disc.exists():
        leave("xorriso : NOTE : No medium present in drive", 5)
    size = disc.stat().st_size
    print("Media current: BD-R sequential recording")
    print("Media status : " + ("is written , is closed" if size else "is blank"))
    print(f"Media blocks : 0 readable , {{0 if size else {sectors}}} writable , {sectors} overall")

def burn(device, image):
    if busy(device):
        leave(f':-( unable to open64("{{device}}",O_RDWR): Device or resource busy', 16)
    data = pathlib.Path(image).read_bytes()
    failing = ROOT / "fail"
    if failing.exists():
        words = failing.read_text()
        failing.unlink()
        if not words.startswith(":-["):
            leave(words, 255)
        pathlib.Path(device).write_bytes(data[: len(data) // 2])
        leave(words, 252)
    pathlib.Path(device).write_bytes(data + bytes(-len(data) % 65536 + 65536))

if name == "mtx":
    mtx()
elif name == "xorriso" and args[0] == "-outdev":
    toc(args[1])
elif name == "xorriso":
    burn(next(a[4:] for a in args if a.startswith("dev=")), args[-1])
elif name == "growisofs":
    burn(*args[args.index("-Z") + 1].split("=", 1))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """A library of files and the folder of its programs; put `bin` on PATH."""

    root: Path
    bin: Path

    @property
    def changer(self) -> str:
        """The robot's node."""
        return str(self.root / "sg3")

    def drive(self, number: int = 0) -> str:
        """Return a drive's node."""
        return str(self.root / "drives" / f"sr{number}")

    def slot(self, number: int) -> Path:
        """Return the file that is a disc in its slot."""
        return self.root / "slots" / str(number)

    def disc(self, number: int) -> Path:
        """Return the file that is a slot's disc, wherever it is."""
        loaded = json.loads((self.root / "loaded.json").read_text())
        for drive, slot in loaded.items():
            if slot == number:
                return Path(self.drive(int(drive)))
        return self.slot(number)

    def fail(self, words: str) -> None:
        """Let the next burn say `words` and fail; ":-[" at their start spoils the disc."""
        (self.root / "fail").write_text(words)

    def hold(self, number: int | None) -> None:
        """Let another program have a drive, or none."""
        (self.root / "held").write_text("" if number is None else f"sr{number}")

    def calls(self, *start: str) -> list[list[str]]:
        """Return the commands so far that start with some words, the changer's node left out."""
        path = self.root / "calls.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        plain = [[word for word in row if word not in ("-f", self.changer)] for row in rows]
        return [row for row in plain if row[: len(start)] == list(start)]


def install(root: Path, *, slots: int, drives: int, disc_bytes: int) -> StandIns:
    """Make a library of blank discs and its programs."""
    for folder in ("slots", "drives", "bin"):
        (root / folder).mkdir(parents=True)
    for number in range(1, slots + 1):
        (root / "slots" / str(number)).touch()
    (root / "loaded.json").write_text("{}")
    text = _PROGRAM.format(
        python=sys.executable, root=str(root), slots=slots, drives=drives,
        sectors=disc_bytes // 2048,
    )  # fmt: skip
    for name in ("mtx", "xorriso", "growisofs", "eject"):
        program = root / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return StandIns(root=root, bin=root / "bin")
