"""What the archive holds, in numbers: for people (`status`) and for the cost model (`inventory`).

Answered from the catalogue alone. The inventory's fields are fixed by docs/formats/inventory.md.
Left out: money and forecasts; the cost model has those.
"""

from __future__ import annotations

import datetime
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.config import ArchiveConfig

FORMAT = "tierwise-inventory/1"


def inventory(catalogue: Catalogue, config: ArchiveConfig) -> dict[str, Any]:
    """Return the archive's inventory: counts, bytes, discs, and growth by day."""
    files, logical = _pair(
        catalogue,
        "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM inodes WHERE mode & 61440 = 32768",
    )
    versions, version_bytes = _pair(
        catalogue, "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM versions"
    )
    return {
        "format": FORMAT,
        "archive_id": config.archive_id,
        "media": config.media,
        "disc_size_bytes": config.disc_size_bytes,
        "data_discs_per_array": config.data_discs,
        "parity_discs_per_array": config.parity_discs,
        "num_files": files,
        "logical_bytes": logical,
        "num_versions": versions,
        "version_bytes": version_bytes,
        "physical_bytes": _number(
            catalogue, "SELECT COALESCE(SUM(size), 0) FROM images WHERE state = 'burned'"
        ),
        "num_images": _count(catalogue, "images", "kind = 'data'"),
        "num_parity_images": _count(catalogue, "images", "kind = 'parity'"),
        "num_arrays": _count(catalogue, "arrays", "1"),
        "num_discs": _count(catalogue, "discs", "state <> 'lost'"),
        "num_discs_lost": _count(catalogue, "discs", "state = 'lost'"),
        "num_slots": config.library_slots,
        "growth": growth_by_day(catalogue),
    }


def growth_by_day(catalogue: Catalogue) -> list[dict[str, Any]]:
    """Return, per UTC day on which something was written, the versions and bytes it added."""
    rows = catalogue.all(
        "SELECT created_ns / 86400000000000, COUNT(*), SUM(size) FROM versions"
        " GROUP BY 1 ORDER BY 1"
    )
    epoch = datetime.date(1970, 1, 1)
    return [
        {
            "day": (epoch + datetime.timedelta(days=day)).isoformat(),
            "num_versions": count,
            "bytes": size,
        }
        for day, count, size in rows
    ]


def status(catalogue: Catalogue, config: ArchiveConfig) -> dict[str, Any]:
    """Return where the archive's bytes are now, and what waits for the next step."""
    states = {
        state: {"versions": count, "bytes": size}
        for state, count, size in catalogue.all(
            "SELECT CASE WHEN resident = 0 THEN 'offline' WHEN state IN ('bucket', 'sealing')"
            " THEN 'resident' ELSE state END, COUNT(*), SUM(size) FROM versions"
            " GROUP BY 1 ORDER BY 1"
        )
    }
    return {
        "archive_id": config.archive_id,
        "array": f"{config.data_discs}+{config.parity_discs}",
        "disc_size_bytes": config.disc_size_bytes,
        "files": _count(catalogue, "inodes", "mode & 61440 = 32768"),
        "folders": _count(catalogue, "inodes", "mode & 61440 = 16384"),
        "content": states,
        "buffer_bytes": buffer_bytes(catalogue),
        "images": _grouped(catalogue, "images"),
        "arrays": _grouped(catalogue, "arrays"),
        "discs": _grouped(catalogue, "discs"),
        "recalls": _grouped(catalogue, "recalls"),
        "unrecorded_changes": _count(catalogue, "inodes", "dirty = 1")
        + _count(catalogue, "tombstones", "dirty = 1"),
    }


def buffer_bytes(catalogue: Catalogue) -> int:
    """Return the bytes of resident versions and buffered images."""
    return _number(
        catalogue, "SELECT COALESCE(SUM(size), 0) FROM versions WHERE resident > 0"
    ) + _number(catalogue, "SELECT COALESCE(SUM(size), 0) FROM images WHERE buffered = 1")


def _number(catalogue: Catalogue, sql: str) -> int:
    return int(catalogue.value(sql))


def _pair(catalogue: Catalogue, sql: str) -> tuple[int, int]:
    row = catalogue.one(sql)
    assert row is not None
    return int(row[0]), int(row[1])


def _count(catalogue: Catalogue, table: str, condition: str) -> int:
    return _number(catalogue, f"SELECT COUNT(*) FROM {table} WHERE {condition}")


def _grouped(catalogue: Catalogue, table: str) -> dict[str, int]:
    rows: list[Any] = catalogue.all(
        f"SELECT state, COUNT(*) FROM {table} GROUP BY state ORDER BY state"
    )
    return dict(rows)
