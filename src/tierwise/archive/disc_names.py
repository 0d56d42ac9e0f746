r"""Names of any bytes -> names every reader of a disc can show, and back.

A Linux name is any bytes but `/` and NUL; a disc's is Unicode of limited length. One rule serves
both the disc and the JSON records (docs/formats/image.md): what is not printable UTF-8 is written
`%XX` per byte, `%` itself included, so the way back is plain percent-decoding. On the disc a name
longer than 180 bytes or units is cut and ends in `%~` and a hash; pieces and old versions end in
`%part` and `%v` marks. No mark can be mistaken for an escape, which is two hex digits. Left out:
Windows' reserved names and characters, which its UDF driver maps by itself.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata

from tierwise.core.errors import DataError

MAX_DISC_NAME = 180
_ESCAPE = re.compile(r"%([0-9A-F]{2})")
_PLAIN = re.compile(rb"[A-Za-z0-9 !#$&'()*+,\-.:;<=>?@\[\]^_`{|}~\"]+")


def escape_name(name: bytes) -> str:
    r"""Return one path component as text, reversibly.

    >>> escape_name(b"a b.txt"), escape_name(b"50%\n"), escape_name("né".encode("latin-1"))
    ('a b.txt', '50%25%0A', 'n%E9')
    """
    if _PLAIN.fullmatch(name):
        return name.decode("ascii")
    parts: list[str] = []
    for character in name.decode("utf-8", errors="surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            parts.append(f"%{code - 0xDC00:02X}")
        elif character in "%\\/" or not _is_shown(character):
            parts.extend(f"%{byte:02X}" for byte in character.encode("utf-8"))
        else:
            parts.append(character)
    return "".join(parts)


def _is_shown(character: str) -> bool:
    """Return whether a character survives every reader: inside the BMP, no control, no format."""
    if ord(character) > 0xFFFF:
        return False
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")


def unescape_name(text: str) -> bytes:
    r"""Return the bytes behind an escaped component.

    >>> unescape_name("50%25%0A")
    b'50%\n'

    Raises:
        DataError: A `%` is not followed by two upper-case hex digits.
    """
    pieces, position = [], 0
    for match in _ESCAPE.finditer(text):
        pieces += [text[position : match.start()].encode("utf-8"), bytes([int(match[1], 16)])]
        position = match.end()
    pieces.append(text[position:].encode("utf-8"))
    if _ESCAPE.sub("", text).count("%"):
        raise DataError(f"{text!r} is not an escaped name")
    return b"".join(pieces)


def escape_path(path: bytes) -> str:
    """Return a path escaped component by component, never shortened: what JSON records hold."""
    return "/".join(escape_name(part) for part in path.split(b"/"))


def unescape_path(text: str) -> bytes:
    """Return the bytes behind an escaped path."""
    return b"/".join(unescape_name(part) for part in text.split("/"))


@functools.lru_cache(maxsize=65536)
def disc_name(name: bytes) -> str:
    """Return a component as it stands on a disc: escaped, and cut with a hash when too long.

    >>> len(disc_name(b"x" * 255)), disc_name(b"x" * 255)[-20:]
    (180, 'xx%~d22609da3ae3956c')
    """
    text = escape_name(name)
    if _length(text) <= MAX_DISC_NAME:
        return text
    mark = "%~" + hashlib.sha256(name).hexdigest()[:16]
    head = text[: MAX_DISC_NAME - len(mark)]
    while _length(head + mark) > MAX_DISC_NAME:
        head = head[:-1]
    return re.sub(r"%[0-9A-F]?$", "", head) + mark


def _length(text: str) -> int:
    """Return the larger of the UTF-8 length and the UDF length (8-bit, or 16-bit twice)."""
    wide = any(ord(character) > 0xFF for character in text)
    return max(len(text.encode("utf-8")), len(text) * (2 if wide else 1))


def disc_path(path: bytes) -> str:
    """Return where a path's plain name stands below `data/` on a disc."""
    return "/".join(disc_name(part) for part in path.split(b"/"))


def version_mark(version: int) -> str:
    """Return the ending of an older version's name where a newer one is on the same disc."""
    return f"%v{version}"


def piece_mark(index: int, count: int) -> str:
    """Return the ending of a piece's name; `cat NAME%part*` joins the pieces in order.

    >>> piece_mark(0, 12)
    '%part00001of00012'
    """
    return f"%part{index + 1:05d}of{count:05d}"
