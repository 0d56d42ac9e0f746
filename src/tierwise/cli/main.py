"""`tierwise`: the command line's root, its lazy groups, and what an error looks like.

Nothing of a capability is imported until one of its verbs runs, so `--help` stays fast. Every
error a user can act on is one sentence and a hint on standard error, with the exit code of
`tierwise.core.errors`; `--debug` shows the traceback.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import json
import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import click

from tierwise import __version__
from tierwise.core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    AccessError,
    MissingFileError,
    StorageFullError,
    TierwiseError,
    UsageError,
)

# name -> (module, attribute, help); the help stands here so that --help imports nothing
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "curriculum": ("curriculum", "group", "Which sample: score, select, train, audit."),
    "offload": ("offload", "group", "Which device: update on the CPU while backward runs."),
    "archive": ("archive", "group", "Which medium: a file system over a disc library."),
    "tco": ("tco", "group", "Which generation: what keeping data costs."),
    "demo": ("demo", "demo", "All four, end to end, on real data, in minutes."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the data's journey."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"tierwise.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tierwise")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Which data goes where, and when?

    Pick the samples worth training on, train models larger than the GPU, keep everything on
    media that last, and know what that will cost.
    """


def main() -> NoReturn:
    """Run the command line and exit with the code of docs/errors.md."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:]))


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(args: list[str]) -> int:
    """Return the exit code of `tierwise ARGS`, having said what went wrong on standard error."""
    as_json = "--json" in args
    try:
        result = cli.main(args=args, prog_name="tierwise", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _say(_sentence(error), _usage_hint(error), error.exit_code, as_json=as_json)
    except (KeyboardInterrupt, click.Abort) as error:
        hint = getattr(error, "hint", None) or "run the same command again to go on"
        return _say("interrupted", hint, EXIT_INTERRUPTED, as_json=as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the last line of defence: every error gets its sentence
        if "--debug" in args:
            traceback.print_exc()
        known = _known(error)
        if known is not None:
            return _say(known.message, known.hint, known.exit_code, as_json=as_json)
        sentence = f"internal error: {type(error).__name__}: {error}"
        return _say(
            sentence, "run it again with --debug and report it", EXIT_INTERNAL, as_json=as_json
        )


def _known(error: Exception) -> TierwiseError | None:
    """Return an error as a member of the tree; system errors get the leaf that refines them."""
    if isinstance(error, TierwiseError):
        return error
    if not isinstance(error, OSError):
        return None
    place = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"no space left{place}")
    if error.errno == errno.EROFS:
        return AccessError(f"a read-only file system:{place}")
    if error.errno in (
        errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
    ):  # fmt: skip
        return UsageError(f"{(error.strerror or str(error)).lower()}:{place}")
    if isinstance(error, PermissionError):
        return AccessError(f"not permitted:{place or ' ' + str(error)}")
    if isinstance(error, FileNotFoundError):
        return MissingFileError(f"no file{place}")
    return None


def _sentence(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:]


def _usage_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"see {context.command_path} --help" if context is not None else None


def _say(sentence: str, hint: str | None, code: int, *, as_json: bool) -> int:
    if as_json:
        line = json.dumps({"error": sentence, "hint": hint, "exit_code": code})
    else:
        line = f"tierwise: {sentence}" + (f"\n  {hint}" if hint else "")
    sys.stderr.write(line + "\n")
    return code
