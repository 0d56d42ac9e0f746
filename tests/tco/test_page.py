"""The page: its answers over HTTP, and the page itself driven in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn
from starlette.responses import HTMLResponse
from starlette.routing import Route

from tierwise.core.errors import UsageError
from tierwise.tco.page.app import make_app
from tierwise.tco.page.server import _listen
from tierwise.tco.scenario import load_preset, load_scenario

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--enable-logging=stderr", "--window-size=1280,900",
)  # fmt: skip
pytestmark = pytest.mark.xdist_group("browser")

# a page that drives the page in a frame, as a user would, and writes down what it saw
PROBE = """<!DOCTYPE html><html><body><pre id="seen"></pre>
<iframe id="f" style="border:0;height:900px;width:1280px" src="/?media=tape,hdd"></iframe><script>
const frame = document.getElementById('f'), seen = {};
const doc = () => frame.contentDocument;
const at = (id) => doc().getElementById(id);
const rest = (ms) => new Promise((done) => setTimeout(done, ms));
async function until(what, test) {
  for (let i = 0; i < 600; i++) { try { if (test()) return; } catch (e) {} await rest(50); }
  throw new Error('never: ' + what);
}
const settled = () => until('settled', () => at('status').textContent === 'up to date'
  && !at('results').classList.contains('stale') && at('map-figure').querySelector('img'));
const curve = () => at('figure-cost-curves').querySelector('img').src;
function type(id, text) {
  const box = at(id); box.focus(); box.value = text;
  box.dispatchEvent(new frame.contentWindow.Event('input', {bubbles: true}));
}
async function drive() {
  await until('loaded', () => doc().getElementById('f-tape.price'));
  await settled();
  seen.first_error = at('error').textContent;
  const before = curve();
  type('f-tape.price', '12.5');
  await until('computing', () => at('status').textContent === 'computing');
  await settled();
  seen.search = frame.contentWindow.location.search;
  seen.curve_changed = curve() !== before;
  seen.slider = at('f-tape.price').parentElement.querySelector('[type=range]').value;
  const after = curve();
  seen.export = at('export-scenario').getAttribute('href');
  doc().body.dataset.old = 'yes';
  frame.contentWindow.location.reload();
  await until('left', () => doc().body && !doc().body.dataset.old);
  await until('back', () => doc().getElementById('f-tape.price'));
  await settled();
  seen.restored = at('f-tape.price').value;
  seen.same_curve = curve() === after;
  type('f-power.pue', '0.5');
  await until('refused', () => at('f-power.pue-error').textContent);
  seen.refusal = at('f-power.pue-error').textContent;
  seen.invalid = at('f-power.pue').getAttribute('aria-invalid');
  seen.others = [...doc().querySelectorAll('.field .error')].filter((e) => e.textContent).length;
  type('f-power.pue', '1.3');
  await until('cured', () => !at('f-power.pue-error').textContent);
  await settled();
  const slide = at('f-tape.life').parentElement.querySelector('[type=range]');
  slide.focus();
  seen.focus = doc().activeElement === slide;
  slide.stepUp();
  slide.dispatchEvent(new frame.contentWindow.Event('input', {bubbles: true}));
  await until('slid', () => frame.contentWindow.location.search.includes('tape.life=11'));
  await settled();
  at('reset').click();
  await until('reset', () => frame.contentWindow.location.search === ''
    && at('status').textContent === 'computing');
  await settled();
  seen.unlabelled = [...doc().querySelectorAll('input,select')].filter(
    (e) => !e.labels.length && !e.getAttribute('aria-label')).length;
  seen.widths = [];
  for (const width of [1280, 400]) {
    frame.style.width = `${width}px`;
    await rest(100);
    seen.widths.push([doc().documentElement.scrollWidth, frame.contentWindow.innerWidth]);
  }
  seen.links = [...doc().querySelectorAll('#assumptions a')].length;
}
drive().then(() => { seen.done = true; }, (e) => { seen.failure = String(e); }).finally(() => {
  document.getElementById('seen').textContent = JSON.stringify(seen);
  document.title = 'finished';
});
</script></body></html>"""
PROBE_POLICY = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def probe(request: Any) -> HTMLResponse:
    return HTMLResponse(PROBE, headers={"Content-Security-Policy": PROBE_POLICY})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    base = load_preset("modern-2026", ["horizon_years=20"])
    app = make_app(base, samples=30)
    app.router.routes.append(Route("/probe", probe))
    listener = _listen(0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)
    listener.close()


def get(url: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, response.read().decode(), headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), {}


def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    for name in ("", "page.css", "page.js"):
        status, text, headers = get(f"{address}/{name}")
        assert status == 200
        assert not re.search(r"(src|href)=\"https?://|url\(|import ", text)
        assert "default-src 'none'" in headers["content-security-policy"]


def test_other_host_names_are_refused(address: str) -> None:
    assert get(f"{address}/api/fields", host="evil.example")[0] == 400
    assert get(f"{address}/api/fields", host="localhost")[0] == 200


def test_every_control_knows_its_source(address: str) -> None:
    fields = json.loads(get(f"{address}/api/fields")[1])["fields"]
    named = {field["name"]: field for field in fields}
    assert {"size", "years", "media", "migration.price", "tape.price", "ssd.decline"} <= set(named)
    for field in fields:
        if "." in field["name"]:
            assert field["source"] not in ("", "the scenario"), field["name"]
            assert field["low"] <= float(field["value"]) <= field["high"], field["name"]


def test_a_query_changes_the_answer(address: str) -> None:
    plain = json.loads(get(f"{address}/api/compare")[1])
    dear = json.loads(get(f"{address}/api/compare?{urlencode({'migration.price': 500})}")[1])
    assert plain["table"]["rows"] != dear["table"]["rows"]
    assert plain["figures"][0]["svg"].startswith("<?xml")
    assert len(plain["ledgers"]) == 2 * 5
    again = json.loads(get(f"{address}/api/compare")[1])
    assert again == plain


@pytest.mark.parametrize(
    ("query", "field", "what"),
    [
        ({"size": "1 XB"}, "size", "not a size"),
        ({"years": "2.5"}, "years", "whole number of years"),
        ({"years": "1000"}, "years", "from 1 to 100"),
        ({"growth": "fast"}, "growth", "not a number"),
        ({"growth": "nan"}, "growth", "not a finite number"),
        ({"power.pue": "0.5"}, "power.pue", "at least 1"),
        ({"tape.decline": "1"}, "tape.decline", "below 1"),
        ({"media": "silica"}, "media", "cannot be costed"),
        ({"media": ""}, "media", "at least one"),
        ({"opex": "D"}, "opex", "not A, B or C"),
        ({"tape.prise": "1"}, "tape.prise", "did you mean tape.price"),
        ({"inventory": "/etc/passwd"}, "inventory", "no field"),
        ({"facts_files": "x"}, "facts_files", "no field"),
    ],
)
def test_a_bad_value_is_refused_by_its_field(
    address: str, query: dict[str, str], field: str, what: str
) -> None:
    status, text, _ = get(f"{address}/api/compare?{urlencode(query)}")
    assert status == 422
    errors = json.loads(text)["errors"]
    assert list(errors) == [field]
    assert what in errors[field]


def test_two_bad_values_are_both_named(address: str) -> None:
    query = urlencode({"growth": "x", "power.pue": "0.1"})
    assert set(json.loads(get(f"{address}/api/compare?{query}")[1])["errors"]) == {
        "growth", "power.pue",
    }  # fmt: skip


def test_inputs_of_media_not_compared_are_ignored(address: str) -> None:
    plain = json.loads(get(f"{address}/api/compare?media=hdd")[1])
    more = json.loads(get(f"{address}/api/compare?tape.price=12&media=hdd")[1])
    assert more["table"] == plain["table"]
    assert [row[0] for row in more["table"]["rows"]] == ["hdd"]


def test_the_map_over_any_two_inputs(address: str) -> None:
    ok = get(f"{address}/api/map?x=migration.price&y=tape.price")
    assert ok[0] == 200
    assert "migration.price" in json.loads(ok[1])["caption"]
    status, text, _ = get(f"{address}/api/map?x=migration.price&y=migration.price")
    assert status == 422
    assert "two different" in json.loads(text)["errors"]["map"]


def test_exports_hold_the_state(address: str, tmp_path: Path) -> None:
    query = urlencode({"size": "3 PB", "tape.price": "12", "media": "tape"})
    status, text, headers = get(f"{address}/export/scenario.toml?{query}")
    assert status == 200
    assert 'filename="scenario.toml"' in headers["content-disposition"]
    path = tmp_path / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    scenario = load_scenario(path)
    assert scenario.data.size == "3 PB"
    assert scenario.media == ("tape",)
    assert scenario.overrides["tape"]["price"] == 12
    assert get(f"{address}/export/ledger.csv?{query}")[1].startswith("row,strategy,medium,year")
    assert "<script" not in get(f"{address}/export/report.html?{query}")[1]
    assert get(f"{address}/export/yearly.csv?{query}")[0] == 200
    assert get(f"{address}/export/passwd?{query}")[0] == 404
    assert get(f"{address}/export/ledger.csv?size=x")[0] == 422


def test_a_taken_port_is_said_in_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot be used"):
            _listen(taken.getsockname()[1])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_serves_until_it_is_told_to_end(how: signal.Signals) -> None:
    code = "from tierwise.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "tco", "serve", "--port", "0", "--set", "horizon_years=3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("serving ").strip()
        assert url.startswith("http://127.0.0.1:")
        assert get(f"{url}api/fields")[0] == 200
        server.send_signal(how)
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        assert errors == ""


@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_the_page_in_a_browser(address: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=120000", "--dump-dom", f"{address}/probe"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    assert found[1], "the probe did not finish: " + done.stdout[-500:]
    seen = json.loads(found[1].replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<"))
    assert seen.get("done"), seen.get("failure")
    assert seen["first_error"] == ""
    assert "tape.price=12.5" in seen["search"]
    assert "media=" in seen["search"]
    assert seen["curve_changed"]
    assert float(seen["slider"]) == pytest.approx(12.5, abs=0.5)
    assert "tape.price=12.5" in seen["export"]
    assert seen["restored"] == "12.5"
    assert seen["same_curve"]
    assert "at least 1" in seen["refusal"]
    assert seen["invalid"] == "true"
    assert seen["others"] == 1
    assert seen["focus"]
    assert seen["unlabelled"] == 0
    assert [inner for _, inner in seen["widths"]] == [1280, 400]
    assert all(page <= inner for page, inner in seen["widths"]), seen["widths"]
    assert seen["links"] > 50
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    refused = [line for line in console if "422" not in line]
    assert refused == [], refused
