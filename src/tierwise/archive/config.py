"""What an archive is made of: `archive.toml` in its root, and the names of known discs.

Left out: everything that changes while the archive lives, which is in the catalogue.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tierwise.archive.drive import Devices
from tierwise.core.config import dump_config, load_config
from tierwise.core.errors import ConfigError, DataError, MissingFileError, UsageError
from tierwise.core.records import write_whole

CONFIG_NAME = "archive.toml"
FORMAT = 1

DISC_TYPES = ("bd-25", "bd-50", "bd-100", "bd-128")
MIN_DISC_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveConfig:
    """The choices an archive keeps for life.

    Attributes:
        archive_id: 32 hex digits, on every disc; the first 8 are part of its label.
        disc_size_bytes: What one disc holds.
        media: Disc type for the inventory: one of `DISC_TYPES`, or any word.
        data_discs: Data images per array (k).
        parity_discs: Parity images per array (m).
        forepart_bytes: Head of each file that stays in the metadata volume; OLFS keeps 256 KB
            (Yan et al., EuroSys 2017, recalled, not checked against the text).
        versions_kept: Contents of a file that stay listed; OLFS's version ring has 15 entries
            (same caution).
        buffer_size_bytes: What the disk buffer may hold before writers get ENOSPC; None: the disk.
        library: Folder of the disc library, absolute or relative to the archive's root.
        library_slots: Discs the library holds.
        devices: The changer and drives of a real library; None: a simulated one.
        format: Version of the archive's layout.
    """

    archive_id: str
    disc_size_bytes: int
    media: str = "bd-100"
    data_discs: int = 10
    parity_discs: int = 2
    forepart_bytes: int = 256 * 1024
    versions_kept: int = 15
    buffer_size_bytes: int | None = None
    library: str = "library"
    library_slots: int = 6120
    devices: Devices | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.disc_size_bytes < MIN_DISC_BYTES:
            raise ConfigError(
                f"a disc of {self.disc_size_bytes} bytes is too small",
                hint=f"the least is {MIN_DISC_BYTES} bytes",
            )
        if not (1 <= self.data_discs <= 200 and 0 <= self.parity_discs <= 4):
            raise ConfigError(
                f"an array of {self.data_discs}+{self.parity_discs} discs is not possible",
                hint="1 to 200 data discs and 0 to 4 parity discs",
            )
        if self.data_discs + self.parity_discs > self.library_slots:
            raise ConfigError(
                f"an array of {self.data_discs + self.parity_discs} discs does not fit a library"
                f" of {self.library_slots}",
                hint="take a smaller array or a larger library",
            )
        self._check_payload()
        if self.versions_kept < 1 or self.forepart_bytes < 0:
            raise ConfigError("versions_kept is at least 1 and forepart_bytes at least 0")

    def _check_payload(self) -> None:
        from tierwise.archive.image import payload_capacity

        members = self.data_discs + self.parity_discs
        try:
            payload_capacity(self.disc_size_bytes, num_members=members)
        except UsageError as error:
            raise ConfigError(str(error), hint=error.hint) from error


def parse_disc(text: str) -> tuple[str, int]:
    """Return (media, bytes) of a disc named like `bd-100` or by its size.

    >>> parse_disc("bd-25")[1], parse_disc("64MiB")
    (25025314816, ('disc', 67108864))
    """
    from tierwise.archive.library import load_timings
    from tierwise.core.units import parse_size

    if text.lower() in DISC_TYPES:
        key = text.lower().replace("-", "_") + "_bytes"
        return text.lower(), int(load_timings()[key].value)
    try:
        return "disc", parse_size(text)
    except ConfigError as error:
        raise ConfigError(
            f"no disc type {text!r}", hint=f"one of {', '.join(DISC_TYPES)}, or a size like 64MiB"
        ) from error


def parse_array(text: str) -> tuple[int, int]:
    """Return (data discs, parity discs) of `10+2`.

    >>> parse_array("10+2")
    (10, 2)
    """
    k, plus, m = text.partition("+")
    if not (plus and k.strip().isdigit() and m.strip().isdigit()):
        raise ConfigError(f"{text!r} is not an array", hint="write it like 10+2")
    return int(k), int(m)


def write_archive_config(root: Path, config: ArchiveConfig) -> None:
    """Write `archive.toml` whole."""
    write_whole(root / CONFIG_NAME, dump_config(config))


def read_archive_config(root: Path) -> ArchiveConfig:
    """Return the configuration of the archive in `root`.

    Raises:
        MissingFileError: There is no archive.
        DataError: It is of a format this version does not know.
    """
    path = root / CONFIG_NAME
    if not path.exists():
        raise MissingFileError(
            f"no archive in {root}", hint=f"make one: tierwise archive init {root}"
        )
    found = _format_of(path)
    if found > FORMAT:
        raise DataError(
            f"the archive in {root} is of format {found}, newer than {FORMAT}",
            hint="use the tierwise that made it, or a newer one",
        )
    return load_config(ArchiveConfig, path)


def _format_of(path: Path) -> int:
    """Return the format a configuration claims, before its keys are judged: a newer one has more.

    What cannot be read counts as ours; `load_config` then says what is wrong with it.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("format", FORMAT)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return FORMAT
    return found if isinstance(found, int) else FORMAT


def config_from_record(archive_id: str, record: Mapping[str, Any]) -> ArchiveConfig:
    """Return the settings a disc's archive record carries; what it lacks gets the default."""
    settings = record.get("settings", {})
    known = {field.name for field in fields(ArchiveConfig)}
    return ArchiveConfig(
        archive_id=archive_id, **{key: value for key, value in settings.items() if key in known}
    )
