"""The live page: what it says, to whom, and that nothing of it is left."""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import socket
import threading
import urllib.error
import urllib.request
import webbrowser

import numpy as np
import pytest

import instep
from chromium import Chromium
from conftest import wait_until
from faults import fragile, mark
from helpers import make
from instep._dashboard.state import POINTS, Curve, Digest
from instep._events import Computed, Updated
from losses import toy


@pytest.fixture(autouse=True)
def _leaves_no_thread():
    yield
    gc.collect()
    assert not dashboards()


def dashboards():
    return [t for t in threading.enumerate() if t.name == "instep dashboard"]


def fetch(url, **headers):
    """The answer's status, headers and text."""
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def state_of(dashboard):
    status, headers, text = fetch(dashboard.url + "state")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(text)


@pytest.fixture
def pool():
    with make(toy, workers=1, shards=2, engine="serial") as pool:
        yield pool


# What it says


def test_the_state_says_what_the_pool_has_done(pool):
    x = np.arange(4.0)
    pool(np.float64(1), x)  # before anyone watched
    with pool.dashboard() as dashboard:
        for w in (4.0, 2.0):
            pool(np.float64(w), x)
        state = state_of(dashboard)
    assert (state["steps"], state["loss"]) == (3, 3.0)
    assert state["curve"] == [[1, 6.0], [2, 3.0]]
    assert state["options"] == "engine serial, 1 worker, 2 shards, 1 thread each"
    assert state["steps_per_second"] == pytest.approx(2 / state["window"], rel=0.01)
    assert state["rows_per_second"] == pytest.approx(4 * state["steps_per_second"])
    assert state["staleness"] == [[0, 2]]
    (worker,) = state["workers"]
    assert worker["shards"] == 6
    assert 0 < worker["busy"] <= 1
    assert set(state["phases"]) == {"script", "split, publish", "wait", "average"}
    assert 0 < sum(state["phases"].values()) <= state["window"]
    shards = [what for lane, _, _, what, _ in state["slices"] if lane == 0]
    assert shards == [f"shard {s} of step {t}" for t in (1, 2) for s in (0, 1)]
    assert (state["lost"], state["recomputed"], state["faults"]) == (0, 0, [])


def test_a_lost_worker_is_listed(tmp_path):
    w, x = {"a": np.ones(3)}, np.arange(4.0)
    with make(fragile, workers=2, shards=2) as pool, pool.dashboard() as dashboard:
        pool(w, x, mark(tmp_path, 1), "killed")
        state = state_of(dashboard)
    assert (state["lost"], state["recomputed"]) == (1, 1)
    (_, lost, reason), (_, again, _) = state["faults"]
    assert re.fullmatch(r"worker \d lost", lost)
    assert "SIGKILL" in reason
    assert re.fullmatch(r"shard \d of step 0 computed again", again)


gate = threading.Event()


def waits(w, x):
    """Takes until the test has seen it."""
    assert gate.wait(30)
    return toy(w, x)


def test_a_shard_is_seen_while_it_is_computed():
    with make(waits, shards=1, engine="serial") as pool, pool.dashboard() as dashboard:
        step = threading.Thread(target=pool, args=(np.float64(1), np.arange(4.0)))
        step.start()
        wait_until(lambda: doing(dashboard), "the shard does not show")
        assert doing(dashboard) == "shard 0 of step 0 (under way)"
        gate.set()
        step.join()
        assert doing(dashboard) == ""


def doing(dashboard):
    """What the only worker has in its hands."""
    return state_of(dashboard)["workers"][0]["doing"]


def test_a_diverged_loss_is_json(pool):
    with np.errstate(all="ignore"), pool.dashboard() as dashboard:
        pool(np.float64(math.inf), np.arange(1.0, 5.0))
        state = state_of(dashboard)
    assert (state["loss"], state["curve"]) == ("inf", [[0, "inf"]])


def test_a_curve_of_any_length_has_few_points():
    curve = Curve()
    for step in range(10 * POINTS):
        curve.add(step, float(step))
    assert POINTS / 2 <= len(curve.points) <= POINTS
    assert curve.points[0] == (0, 0.0)
    assert curve.points[-1][0] >= 0.99 * 10 * POINTS
    steps = [step for step, _ in curve.points]
    gaps = {after - step for step, after in itertools.pairwise(steps)}
    assert len(gaps) == 1


def test_rates_and_shares_are_those_of_the_last_ten_seconds():
    with make(toy, engine="serial") as pool:
        statistics = pool.statistics()
    digest = Digest(100.0)
    for second in range(100, 150):
        digest.note(Computed(0, second, 0, 1, second + 0.25, second + 1, 0.5, ""))
        digest.note(Updated(second, 1.0, 32, 1, 0, 0, second + 1.0))
    view = digest.view(150.0, statistics)
    rates = view["window"], view["steps_per_second"], view["rows_per_second"]
    assert rates == (10, 1, 32)
    assert view["workers"][0]["busy"] == 0.5
    later = digest.view(155.0, statistics)  # nothing has happened since
    assert later["steps_per_second"] == 0.5


# To whom


def test_the_page_loads_nothing_from_elsewhere(pool):
    with pool.dashboard() as dashboard:
        status, headers, text = fetch(dashboard.url)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_only_who_knows_the_address_gets_an_answer(pool):
    with pool.dashboard() as dashboard:
        root, token = re.fullmatch(
            r"(http://127\.0\.0\.1:\d+/)(.{20,})/", dashboard.url
        ).groups()
        port = root.split(":")[2].rstrip("/")
        for path in ("", "state", f"{token}", f"{token}x/", f"{token}/../", "é"):
            assert fetch(root + urllib.request.quote(path))[0] == 404
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
            assert fetch(dashboard.url + "state", Host=host)[0] == 403
        assert fetch(dashboard.url, Host=f"localhost:{port}")[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(dashboard.url, data=b"{}")


def test_it_listens_on_the_loopback_interface_alone(pool):
    with pool.dashboard() as dashboard:
        assert dashboard._server.socket.getsockname()[0] == "127.0.0.1"


# Ports, and the end


def test_a_port_that_is_taken_is_an_error_that_names_it(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(instep.ArgumentError, match=f"port={port} ") as caught:
            pool.dashboard(port=port)
    assert "Address already in use" in str(caught.value)
    assert "port=0 for any that is free" in str(caught.value)
    with pool.dashboard(port=port) as dashboard:
        assert f":{port}/" in dashboard.url
    with pool.dashboard(port=port):  # it is free again at once
        pass


@pytest.mark.parametrize("port", [-1, 65536, "8080", 80.0, True])
def test_what_is_no_port_is_an_error(pool, port):
    with pytest.raises(instep.ArgumentError, match="whole number from 0 to 65535"):
        pool.dashboard(port=port)


def test_close_leaves_no_thread_and_no_port(pool):
    dashboard = pool.dashboard()
    port = dashboard._server.server_port
    silent = socket.create_connection(("127.0.0.1", port))  # as browsers do, in advance
    wait_until(lambda: len(dashboards()) == 2, "the connection was not accepted")
    dashboard.close()
    dashboard.close()
    assert not dashboards()
    assert silent.recv(1) == b""
    silent.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not pool._dispatcher.events.is_on
    assert pool(np.float64(1), np.arange(4.0))[1] == 1.5


def test_it_ends_with_the_pool():
    pool = make(toy, engine="serial")
    pool.dashboard()
    pool.close()
    assert not dashboards()
    with pytest.raises(instep.PoolClosedError):
        pool.dashboard()


def test_it_ends_with_a_pool_that_is_garbage():
    pool = make(toy, engine="serial")
    pool.dashboard()
    del pool
    gc.collect()
    assert not dashboards()


def test_a_trace_and_two_pages_at_once(pool, tmp_path):
    with pool.dashboard() as one, pool.dashboard() as other:
        with pool.trace(tmp_path / "run.json"):
            pool(np.float64(1), np.arange(4.0))
        pool(np.float64(1), np.arange(4.0))
        assert (
            state_of(one)["curve"] == state_of(other)["curve"] == [[0, 1.5], [1, 1.5]]
        )
    events = json.loads((tmp_path / "run.json").read_text())
    assert sum(event["name"] == "update" for event in events) == 1


def test_it_opens_the_browser_when_asked(pool, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    with pool.dashboard(open_browser=True) as dashboard:
        assert opened == [dashboard.url]


# In a browser

DARK, LIGHT = "rgb(22, 27, 34)", "rgb(255, 255, 255)"
PAPER = "getComputedStyle(document.documentElement).backgroundColor"
TEXTS = "[...document.querySelectorAll('%s')].map(e => e.textContent)"
RECTANGLES = "document.querySelectorAll('[data-lane=\"%d\"] rect').length"


def show(browser, url, width, scheme):
    """The page, once it has been told of the pool."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setEmulatedMedia", features=media)
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.events.clear()
    browser.call("Page.navigate", url=url)
    wait_for(browser, "document.readyState == 'complete'")
    wait_for(browser, "document.getElementById('steps').textContent != '–'")


def wait_for(browser, condition):
    wait_until(lambda: browser.evaluate(condition), condition)


def text(browser, name):
    return browser.evaluate(f"document.getElementById('{name}').textContent")


def test_a_browser_shows_it_on_phone_and_desktop_and_follows(tmp_path):
    w, x, folder = {"a": np.ones(3)}, np.arange(4.0), mark(tmp_path, 1)
    with (
        make(fragile, workers=2, shards=4) as pool,
        Chromium() as browser,
        pool.dashboard() as dashboard,
    ):
        for _ in range(3):
            pool(w, x, folder, "killed")
        for width, scheme in [(390, "dark"), (1200, "light")]:
            show(browser, dashboard.url, width, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth") == width
            assert browser.evaluate(PAPER) == (DARK if scheme == "dark" else LIGHT)
            asked = set(browser.requests())
            assert asked == {dashboard.url, dashboard.url + "state"}
            assert browser.complaints() == []
        assert [text(browser, n) for n in ("steps", "loss")] == ["3", "1.500"]
        assert text(browser, "survived") == "1"
        labels = browser.evaluate(TEXTS % "#lanes span")
        assert labels == ["master", "worker 0", "worker 1"]
        assert browser.evaluate(RECTANGLES % 0) + browser.evaluate(RECTANGLES % 1) >= 12
        assert browser.evaluate(TEXTS % "#workers tbody td:first-child") == ["0", "1"]
        assert "wait" in browser.evaluate(TEXTS % "#phases tbody td:first-child")
        assert len(browser.evaluate(TEXTS % "#faults tbody tr")) == 2
        pool(w, x, folder, "killed")
        wait_for(browser, "document.getElementById('steps').textContent == '4'")
        dashboard.close()
        wait_for(browser, "document.getElementById('status').className == 'fault'")
        assert "these are its last figures" in text(browser, "status")
        assert text(browser, "steps") == "4"
