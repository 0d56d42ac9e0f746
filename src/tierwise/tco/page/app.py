"""The page's routes: the page itself, its answers as JSON, and its exports.

Every answer is a function of the address query, so the same address gives the same page. Bound
to loopback by the caller and refusing other host names, so that no web site can reach it
through a name of its own; the content policy lets the browser load nothing from anywhere else.
Left out: caching; an answer takes about a second.
"""

from __future__ import annotations

import dataclasses
import threading
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tierwise.core.config import dump_config
from tierwise.core.errors import TierwiseError
from tierwise.core.report import Figure, Table, csv_of, render_html
from tierwise.tco import report as reporting
from tierwise.tco.compare import Comparison, compare
from tierwise.tco.facts import FactSet, facts_of_files
from tierwise.tco.figures import category_bars, cost_curves, winner_map
from tierwise.tco.inputs import resolve_inputs
from tierwise.tco.ledger import LEDGER_HEADER, ledger_rows
from tierwise.tco.page.state import StateError, fields_of, scenario_of
from tierwise.tco.scenario import Scenario
from tierwise.tco.solve import map_winners, spaced

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES = 400
MAP_POINTS = 17
HOSTS = ["127.0.0.1", "localhost", "[::1]"]
_NOT_STATE = frozenset({"x", "y"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
_TYPES = {"page.css": "text/css", "page.js": "text/javascript"}


class _Headers(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers.setdefault("Content-Security-Policy", _POLICY)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response


def make_app(base: Scenario, *, seed: int = 0, samples: int = SAMPLES) -> Starlette:
    """Return the page's application over a base scenario.

    Args:
        base: What the page shows before anything is changed.
        seed: Seed of the draws.
        samples: Draws behind the bands.
    """
    answers = _Answers(base, seed=seed, samples=samples)
    return Starlette(
        routes=[
            Route("/", _static("page.html")),
            Route("/page.css", _static("page.css")),
            Route("/page.js", _static("page.js")),
            Route("/api/fields", answers.fields),
            Route("/api/compare", answers.compare),
            Route("/api/map", answers.map),
            Route("/export/{name}", answers.export),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(_Headers),
        ],
    )


def _static(name: str) -> Any:
    def send(request: Request) -> Response:
        text = resources.files("tierwise.tco.page").joinpath(name).read_text(encoding="utf-8")
        if name.endswith(".html"):
            return HTMLResponse(text)
        return Response(text, media_type=_TYPES[name])

    return send


class _Answers:
    """Computes answers; drawing is done by one thread at a time, as matplotlib wants it."""

    def __init__(self, base: Scenario, *, seed: int, samples: int) -> None:
        self._base, self._seed, self._samples = base, seed, samples
        self._facts: FactSet = facts_of_files(base.facts_files)
        self._fields = fields_of(base, self._facts)
        self._drawing = threading.Lock()

    def fields(self, request: Request) -> Response:
        """Return the controls and what may be chosen for the map."""
        return JSONResponse(
            {
                "name": self._base.name,
                "fields": [dataclasses.asdict(item) for item in self._fields],
                "samples": self._samples,
            }
        )

    def compare(self, request: Request) -> Response:
        """Return tables, figures and notes of a comparison, or errors by field."""
        try:
            result = self._result(request)
        except StateError as error:
            return JSONResponse({"errors": error.errors}, status_code=422)
        except TierwiseError as error:
            return JSONResponse({"errors": {"": _sentence(error)}}, status_code=422)
        with self._drawing:
            figures = [_figure(cost_curves(result)), _figure(category_bars(result))]
        ledgers = [
            _table(table)
            for item in result.strategies
            for table in (
                reporting.category_table(item),
                reporting.year_table(item, result.scenario.start_year),
            )
        ]
        return JSONResponse(
            {
                "table": _table(reporting.cost_table(result)),
                "figures": figures,
                "tables": [
                    _table(reporting.share_table(result)),
                    _table(reporting.split_table(result)),
                    _table(reporting.cause_table(result)),
                ],
                "ledgers": ledgers,
                "assumptions": {
                    "caption": "Every input, its range and its source",
                    "header": reporting.ASSUMPTION_HEADER,
                    "rows": reporting.assumption_rows(result),
                },
                "notes": reporting.notes_of(result),
            }
        )

    def map(self, request: Request) -> Response:
        """Return the winner map over the inputs `x` and `y` of the query."""
        try:
            scenario = self._scenario(request)
            axes = [self._axis(scenario, request.query_params.get(name, "")) for name in "xy"]
            mapped = map_winners(scenario, *axes[0], *axes[1], facts=self._facts)
        except StateError as error:
            return JSONResponse({"errors": error.errors}, status_code=422)
        except TierwiseError as error:
            return JSONResponse({"errors": {"map": _sentence(error)}}, status_code=422)
        with self._drawing:
            return JSONResponse(_figure(winner_map(mapped)))

    def export(self, request: Request) -> Response:
        """Return a file made from the state in the query."""
        name = request.path_params["name"]
        try:
            result = self._result(request)
        except (StateError, TierwiseError) as error:
            return PlainTextResponse(f"{error}\n", status_code=422)
        if name == "scenario.toml":
            text, kind = dump_config(result.scenario), "application/toml"
        elif name == "ledger.csv":
            rows = ledger_rows(item.ledger for item in result.strategies)
            text, kind = csv_of(LEDGER_HEADER, rows), "text/csv"
        elif name == "yearly.csv":
            text, kind = csv_of(*reporting.yearly_table(result)), "text/csv"
        elif name == "report.html":
            with self._drawing:
                text, kind = render_html(reporting.report_of(result)), "text/html"
        else:
            return PlainTextResponse(f"no file {name}\n", status_code=404)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == "report.html":  # the report styles itself
            headers["Content-Security-Policy"] = (
                "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
            )
        return Response(text, media_type=kind, headers=headers)

    def _scenario(self, request: Request) -> Scenario:
        query = {k: v for k, v in request.query_params.items() if k not in _NOT_STATE}
        return scenario_of(self._base, query, self._facts)

    def _result(self, request: Request) -> Comparison:
        return compare(
            self._scenario(request), samples=self._samples, seed=self._seed, facts=self._facts
        )

    def _axis(self, scenario: Scenario, key: str) -> tuple[str, NDArray[Any]]:
        """Return an input and points over its slider's range, or its sourced one."""
        item = resolve_inputs(scenario, self._facts).require(key)
        low, high = item.low, item.high
        for control in self._fields:
            if control.name == key:
                low, high = control.low, control.high
        if low == high:
            low, high = 0.5 * item.value, 2.0 * item.value
        return key, spaced(low, high, MAP_POINTS, log=False)


def _sentence(error: TierwiseError) -> str:
    return error.message + (f" ({error.hint})" if error.hint else "")


def _table(table: Table) -> dict[str, object]:
    return {"caption": table.caption, "header": table.header, "rows": table.rows}


def _figure(figure: Figure) -> dict[str, str]:
    return {"name": figure.name, "caption": figure.caption, "svg": figure.svg}
