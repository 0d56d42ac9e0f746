"""Parse and print sizes, durations and money. PB is not PiB, and a price has a year.

Values travel through tierwise as plain numbers in suffixed names (`capacity_bytes`,
`lifetime_years`, `cost_usd`); this module stands at the edges, where people type and read.
Left out: unit algebra, and bit rates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tierwise.core.errors import ConfigError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {f"{p}I": 1024 ** (i + 1) for i, p in enumerate("KMGTPE")}
_SIZE = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([KMGTPE]I?|)B?\s*", re.IGNORECASE)

YEAR_SECONDS = 365.25 * 86400.0
_DURATION = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0, "week": 604800.0,
    "month": YEAR_SECONDS / 12, "y": YEAR_SECONDS, "yr": YEAR_SECONDS, "year": YEAR_SECONDS,
}  # fmt: skip
_DURATION_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_MONEY = re.compile(
    r"\s*(-?)\$?\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([KMB]?)\s*([A-Z]{3})?\s*(?:\((\d{4})\))?\s*"
)


def parse_size(text: str) -> int:
    """Return a number of bytes; `KB MB GB TB PB EB` are powers of 1000, `KiB ... EiB` of 1024.

    A fraction such as `1.01 KiB` is rounded to the nearest byte.

    >>> parse_size("1 PB"), parse_size("1 PiB"), parse_size("64MiB"), parse_size("512")
    (1000000000000000, 1125899906842624, 67108864, 512)

    Raises:
        ConfigError: Not a size, or not a whole number of bytes.

    Source: IEC 80000-13:2008 (binary prefixes), SI brochure (decimal prefixes).
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size", hint="write it like 64MiB, 100 GB or 1 PB")
    number, prefix = match[1].replace(",", "").replace("_", ""), match[2].upper()
    scale = _BINARY[prefix] if prefix in _BINARY else _DECIMAL[prefix]
    whole, _, fraction = number.partition(".")
    if fraction.strip("0") and not prefix:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return round(int(whole + fraction) * Fraction(scale, 10 ** len(fraction)))


def format_size(num_bytes: float, *, binary: bool = False) -> str:
    """Return a size with three significant digits and its unit.

    >>> format_size(1_200_000_000), format_size(1 << 20, binary=True), format_size(12)
    ('1.20 GB', '1.00 MiB', '12 B')
    """
    base, suffix = (1024.0, "iB") if binary else (1000.0, "B")
    value, units = float(num_bytes), ["", *"KMGTPE"]
    index = 0
    while abs(value) >= base * 0.9995 and index < len(units) - 1:
        value, index = value / base, index + 1
    if index == 0:
        return f"{value:.0f} B"
    return f"{_three_digits(value)} {units[index]}{suffix}"


def parse_duration(text: str) -> float:
    """Return seconds; parts add up, a year is 365.25 days and a month a twelfth of it.

    >>> parse_duration("1h 30 min"), parse_duration("250ms"), parse_duration("2 years") / 86400
    (5400.0, 0.25, 730.5)

    Raises:
        ConfigError: Not a duration.
    """
    position, seconds, found = 0, 0.0, False
    while position < len(text):
        match = _DURATION_PART.match(text, position)
        unit = match[2].lower() if match else ""
        scale = _DURATION.get(unit, _DURATION.get(unit.removesuffix("s")))
        if match is None or scale is None:
            found = False
            break
        seconds, position, found = seconds + float(match[1]) * scale, match.end(), True
    if not found:
        raise ConfigError(f"{text!r} is not a duration", hint="write it like 90s, 1h 30min or 50y")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> format_duration(0.0042), format_duration(75), format_duration(2 * YEAR_SECONDS)
    ('4.2 ms', '1 min 15 s', '2.0 y')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds < YEAR_SECONDS:
        return f"{seconds / 86400:.1f} d"
    return f"{seconds / YEAR_SECONDS:.1f} y"


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """An amount with the currency and the year whose prices it is in.

    Adding amounts of different currencies or years is refused: prices of 2017 and of 2026 are
    different units.
    """

    amount: float
    currency: str = "USD"
    year: int

    def __add__(self, other: Money) -> Money:
        """Return the sum of two amounts in the same currency and year."""
        if (self.currency, self.year) != (other.currency, other.year):
            raise ConfigError(
                f"cannot add {self.currency} of {self.year} to {other.currency} of {other.year}",
                hint="convert one of them to the other's currency and year first",
            )
        return Money(amount=self.amount + other.amount, currency=self.currency, year=self.year)


def parse_money(text: str, *, year: int | None = None) -> Money:
    """Return money from `"25 USD (2026)"`, `"$1.2M (2026)"` or, with `year` given, `"600"`.

    >>> parse_money("1,200 USD (2026)")
    Money(amount=1200.0, currency='USD', year=2026)

    Raises:
        ConfigError: Not an amount, or no year in the text nor in `year`.
    """
    match = _MONEY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not an amount", hint='write it like "25 USD (2026)"')
    tagged = int(match[5]) if match[5] else year
    if tagged is None:
        raise ConfigError(f"{text!r} has no year", hint='add the price year, as in "25 USD (2026)"')
    scale = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}[match[3]]
    amount = float(match[2].replace(",", "").replace("_", "")) * scale
    return Money(amount=-amount if match[1] else amount, currency=match[4] or "USD", year=tagged)


def format_usd(amount: float) -> str:
    """Return US dollars with three significant digits and K, M or B.

    >>> format_usd(487_900_000), format_usd(5.217), format_usd(-1200), format_usd(999.996)
    ('$488 M', '$5.22', '-$1.20 K', '$1.00 K')
    """
    value, units, index = abs(float(amount)), ["", " K", " M", " B"], 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000.0, index + 1
    sign = "-" if amount < 0 else ""
    return f"{sign}${_three_digits(value)}{units[index]}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    digits = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{digits}f}"
