"""FORMAT.txt: the note on every disc by which a stranger reads it without this program.

The text is the data file `format_note.txt` with the disc's identity filled in; a test holds it to
what docs/formats/image.md and parity.md say. Left out: translations.
"""

from __future__ import annotations

import datetime
from importlib import resources

from tierwise.archive.disc_slice import ArrayPosition, ImageIdentity


def format_note(identity: ImageIdentity, created_ns: int, array: ArrayPosition | None) -> bytes:
    """Return FORMAT.txt for one image."""
    template = (
        resources.files("tierwise.archive").joinpath("format_note.txt").read_text(encoding="ascii")
    )
    place = "none: this disc stands alone"
    if array is not None:
        place = (
            f"{array.array_id}, disc {array.index} (counted from 0) of"
            f" {array.data_count} data + {array.parity_count} parity"
        )
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        microseconds=created_ns // 1000
    )
    return template.format(
        label=identity.label,
        sequence=identity.sequence,
        image_id=identity.image_id,
        archive_id=identity.archive_id,
        created=moment.isoformat(sep=" ", timespec="seconds")[:19],
        array=place,
    ).encode("ascii")
