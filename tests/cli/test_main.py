"""The shell: one sentence, the right exit code, no traceback, and a fast --help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from tierwise.cli import main as shell
from tierwise.core.errors import MissingExtraError, StorageFullError


def tierwise(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierwise", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_help_lists_the_four_groups_and_the_demo() -> None:
    done = tierwise("--help")
    assert done.returncode == 0
    for name in ("curriculum", "offload", "archive", "tco", "demo"):
        assert f"\n  {name} " in done.stdout


def test_help_imports_no_capability() -> None:
    code = (
        "import sys\nfrom tierwise.cli.main import run\nrun(['--help'])\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'pyarrow', 'rich', 'pycdlib', 'transformers'}\n"
        "loaded = heavy & set(sys.modules) | {m for m in sys.modules if m.startswith('tierwise.')"
        " and m.split('.')[1] not in ('core', 'cli')}\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demmo"], "did you mean demo?"),
        (["nonsense"], "commands: curriculum, offload, archive, tco, demo"),
        (["--nope"], "no such option"),
        (["tco", "nonsense"], "no such command"),
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    done = tierwise(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tierwise: ")
    assert sentence in done.stderr.lower()
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (MissingExtraError("needs numpy", hint="pip install 'tierwise[tco]'"), 3, "needs numpy"),
        (StorageFullError("no space left while writing x"), 7, "no space left while writing x"),
        (OSError(28, "No space left on device", "/data/x"), 7, "no space left /data/x"),
        (PermissionError(13, "Permission denied", "/root/x"), 8, "not permitted: /root/x"),
        (OSError(30, "Read-only file system", "/ro/x"), 8, "a read-only file system: /ro/x"),
        (OSError(36, "File name too long", "/long"), 2, "file name too long: /long"),
        (NotADirectoryError(20, "Not a directory", "/f/x"), 2, "not a directory: /f/x"),
        (FileExistsError(17, "File exists", "/f"), 2, "file exists: /f"),
        (FileNotFoundError(2, "No such file", "/no/x"), 6, "no file /no/x"),
        (ZeroDivisionError("division by zero"), 70, "internal error: ZeroDivisionError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_becomes_a_sentence_and_a_code(
    error: BaseException,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: click.Command, **keywords: object) -> None:
        raise error

    monkeypatch.setattr(shell.cli, "main", lambda **keywords: fail(shell.cli))
    assert shell.run(["demo"]) == code
    plain = capsys.readouterr().err
    assert sentence in plain
    assert "Traceback" not in plain
    assert shell.run(["demo", "--json"]) == code
    row = json.loads(capsys.readouterr().err)
    assert (row["exit_code"], sentence in row["error"]) == (code, True)
    if code == 70:
        assert shell.run(["demo", "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_with_130_and_a_sentence(number: int, tmp_path: Path) -> None:
    code = (
        "import time, click, pathlib\nfrom tierwise.cli import main\n"
        f"ready = pathlib.Path({str(tmp_path / 'ready')!r})\n"
        "main.cli.main = lambda **k: (ready.touch(), time.sleep(60))\nmain.main()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    child.send_signal(number)
    _, error = child.communicate(timeout=30)
    assert child.returncode == 130
    assert error.startswith("tierwise: interrupted\n")


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m tierwise --help | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
