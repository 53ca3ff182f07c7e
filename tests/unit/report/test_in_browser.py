"""The page in a real browser; skipped where none is installed."""

from threading import Thread

import httpx
import numpy as np
import pytest

from openrl.report.page import write_report
from openrl.report.serve import LiveReport, start_server
from openrl.types import RenderedTurn
from openrl.vision.pictures import png_image
from tests.browser import browser
from tests.made_runs import HOSTILE, STEPS, write_run

READY = "return document.documentElement.dataset.ready === 'yes'"
ROWS = "return document.querySelectorAll('#table tbody tr').length"
FOUND = "return document.getElementById('found').textContent"


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def window():
    with browser("--window-size=1400,1000") as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = write_run(tmp_path_factory.mktemp("made") / "run")
    write_report([directory], directory / "report.html")
    return (directory / "report.html").as_uri()


def test_every_section_is_there_without_an_error(window, page):
    window.open(page)
    window.wait(READY)
    titles = window.run("return [...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert titles == [
        "Is it learning?",
        "Is it healthy?",
        "Where does the time go?",
        "What differs?",
        "Look here first",
        "Curves",
        "Rollouts",
        "One trajectory",
        "Groups",
    ]
    window.wait("return document.querySelectorAll('#learning canvas').length === 2")
    assert "changed their kind" in window.run("return document.getElementById('health').innerText")
    assert window.errors() == []


def test_filters_and_sorting_act(window, page):
    window.open(page)
    window.wait(READY)
    assert window.run(FOUND) == f"{8 * STEPS + 8} of {8 * STEPS + 8} trajectories"
    window.run(
        "const f = document.getElementById('filter-text'); f.value = 'I DO NOT';"
        "f.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    window.wait("return document.getElementById('found').textContent.startsWith('42 of')")
    window.run("document.querySelector('[data-sort=step]').click()")
    first = "return document.querySelector('#table tbody td').textContent"
    assert window.run(first) == "10"
    assert window.errors() == []


def test_a_token_has_the_colour_and_the_figures_of_its_values(window, page):
    window.open(page)
    window.wait(READY)
    window.run("location.hash = '#t=0/5/1'")
    window.wait("return document.querySelectorAll('.tokens span').length === 4")
    colours = "return [...document.querySelectorAll('.tokens span')].map((s) => s.style.background)"
    assert window.run(colours) == [
        "",
        "",
        "rgba(230, 120, 20, 0.3)",  # 0.5 of 1.5: 0.1 + 0.6 / 3
        "rgba(230, 120, 20, 0.7)",
    ]
    window.run(
        "const c = document.getElementById('colour-by'); c.value = 'entropy';"
        "c.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert window.run(colours)[2:] == ["rgba(200, 40, 60, 0.4)", "rgba(200, 40, 60, 0.7)"]
    window.run("document.querySelectorAll('.tokens span')[3].click()")
    said = window.run("return document.getElementById('token').textContent")
    assert said.startswith('token 3 "t1": advantage 1.5, gap 0.3, entropy 4, age 5')
    assert "= advantage" in window.run("return document.getElementById('why').innerText")
    assert window.errors() == []


def test_hostile_text_stays_text(window, tmp_path):
    directory = write_run(tmp_path / "hostile", HOSTILE, texts=HOSTILE)
    write_report([directory], directory / "report.html")
    window.open((directory / "report.html").as_uri())
    window.wait(READY)
    window.run("location.hash = '#t=0/5/1'")
    window.wait("return document.querySelectorAll('.tokens span').length === 4")
    assert window.run("return document.title") == "hostile"
    assert window.run("return document.images.length") == 0
    assert "</script><script>" in window.run("return document.getElementById('look').textContent")
    assert window.errors() == []


def test_an_evaluated_episode_has_a_transcript_with_its_pictures(window, tmp_path):
    seen = png_image(np.full((2, 3, 3), 7, np.uint8))
    parts = [{"type": "text", "text": HOSTILE}, {"type": "image", "image": seen}]
    frames = [png_image(np.full((4, 6, 3), shade, np.uint8)) for shade in (0, 200)]
    turns = (
        RenderedTurn(({"role": "user", "content": parts},), frames[0], "<b>on</b>", 0.25),
        RenderedTurn(({"role": "user", "content": "bright"},), frames[1]),
    )
    directory = write_run(tmp_path / "run", turns=turns)
    write_report([directory], directory / "report.html")
    window.open((directory / "report.html").as_uri())
    window.wait(READY)
    window.run("location.hash = '#t=0/10/8'")  # eight were trained before it
    window.wait("return document.querySelectorAll('.turn').length === 2")
    said = window.run(
        "return [...document.querySelectorAll('.turn')].map((t) =>"
        " [...t.querySelectorAll('h4, pre')].map((e) => e.textContent))"
    )
    told = HOSTILE.encode(errors="replace").decode() + "\n[image]"
    assert said == [["user", told, "policy, reward 0.25", "<b>on</b>"], ["user", "bright"]]
    shown = "return [...document.images].map((i) => [i.naturalWidth, i.naturalHeight])"
    assert window.wait(f"{shown}.every(([w]) => w > 0) && document.images.length === 3")
    assert window.run(shown) == [[6, 4], [3, 2], [6, 4]]
    assert window.run("return document.title") == "run"
    assert window.errors() == []


def test_a_served_page_shows_trajectories_that_it_does_not_hold(window, tmp_path, monkeypatch):
    monkeypatch.setattr("openrl.report.rollouts.MOST_TOKENS", 0)
    report = LiveReport([write_run(tmp_path / "run")])
    with start_server(report, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            window.open(address)
            window.wait(READY)
            window.run("location.hash = '#t=0/5/1'")
            window.wait("return document.querySelectorAll('.tokens span').length === 4")
            assert window.errors() == []
        finally:
            server.shutdown()
            thread.join()


def test_the_server_answers_this_machine_alone_and_follows_the_run(tmp_path):
    directory = write_run(tmp_path / "run")
    report = LiveReport([directory])
    with start_server(report, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.server_address[0] == "127.0.0.1"
            address = f"http://127.0.0.1:{server.server_port}"
            with httpx.Client(base_url=address, trust_env=False) as client:
                assert client.get("/", headers={"Host": "elsewhere.example:80"}).status_code == 403
                before = client.get("/stamp").text
                (directory / "summary.json").write_text('{"steps": 1}')
                assert client.get("/stamp").text != before
                assert (
                    "no trajectory 0 of step 99"
                    in client.get("/trajectory?run=0&step=99&number=0").json()["error"]
                )
                assert client.get("/trajectory?run=7&step=1&number=0").status_code == 404
                assert client.get("/trajectory?run=x").status_code == 404
        finally:
            server.shutdown()
            thread.join()
