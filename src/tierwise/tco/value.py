"""Cash flows -> present value, endowment, pay as you go, cost per TB-year.

The endowment is what has to be put aside today so that, earning the discount rate, it pays
every bill to the horizon. Pay as you go is the bill of each year over the data held in it. Left
out: stochastic interest rates; the discount rate is one draw a sample.

Source: discount factors, any textbook; endowment, D. S. H. Rosenthal,
https://economicmodel.dshr.org; the two price models, "Total Cost of Preservation", UC Curation
Center, rev. 2.2.1 (2014).

Legend: T years, S samples.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tierwise.core.errors import ConfigError
from tierwise.tco.inputs import Array, Point
from tierwise.tco.scenario import FinanceSpec

_OFFSET_YEARS = {"start": 0.0, "mid": 0.5, "end": 1.0}


def fisher_nominal(real_rate: float, inflation: float) -> float:
    """Return the nominal rate that equals a real rate under inflation.

    >>> round(fisher_nominal(0.03, 0.025), 6)
    0.05575

    Source: I. Fisher, The Theory of Interest (1930): (1 + n) = (1 + r)(1 + i), not the sum.
    """
    return (1.0 + real_rate) * (1.0 + inflation) - 1.0


def discount_factors(
    rate_S: Array, num_years: int, timing: Literal["start", "mid", "end"] = "start"
) -> Array:
    """Return present-value factors of shape (T, S): (1 + r) ** -(t + offset).

    >>> float(round(discount_factors(np.array([0.03]), 50).sum(), 2))
    26.5
    """
    exponent_T1 = np.arange(num_years, dtype=np.float64)[:, None] + _OFFSET_YEARS[timing]
    return np.asarray((1.0 + np.asarray(rate_S, dtype=np.float64)) ** -exponent_T1)


def price_level(finance: FinanceSpec, point: Point, num_years: int) -> Array:
    """Return by how much cash flows of each year have grown with inflation: 1 if real."""
    if finance.cash_basis == "real":
        return np.ones((num_years, 1))
    exponent_T1 = np.arange(num_years, dtype=np.float64)[:, None] + _OFFSET_YEARS[finance.timing]
    return np.asarray((1.0 + point["finance.inflation"]) ** exponent_T1)


def present_values(flow_TS: Array, finance: FinanceSpec, point: Point) -> Array:
    """Return each year's present value; the sum over years is the endowment.

    Args:
        flow_TS: Cash in prices of the currency year.
        finance: Bases and timing.
        point: Inputs with finance.discount and finance.inflation.

    Raises:
        ConfigError: Some cost is too large for a number.
    """
    num_years = flow_TS.shape[0]
    with np.errstate(over="ignore", invalid="ignore"):
        factors_TS = discount_factors(point["finance.discount"], num_years, finance.timing)
        present_TS = flow_TS * price_level(finance, point, num_years) * factors_TS
        total_S = present_TS.sum(axis=0)
    if not np.isfinite(total_S).all():
        raise ConfigError(
            "the cost is too large for a number", hint="some rate or price is far out of range"
        )
    return present_TS


def cost_per_tb_year(present_TS: Array, logical_TS: Array, factors_TS: Array) -> Array:
    """Return the level price per TB-year whose present value is the cost; NaN without data."""
    weight_S = (logical_TS * factors_TS).sum(axis=0)
    price_S: Array = np.full(present_TS.shape[1], np.nan)
    np.divide(present_TS.sum(axis=0), weight_S, out=price_S, where=weight_S > 0)
    return price_S


def pay_as_you_go(cash_TS: Array, logical_TS: Array) -> Array:
    """Return each year's cash over the TB held in it; NaN in years without data."""
    price_TS: Array = np.full(cash_TS.shape, np.nan)
    np.divide(cash_TS, logical_TS, out=price_TS, where=logical_TS > 0)
    return price_TS
