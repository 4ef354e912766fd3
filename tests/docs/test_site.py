"""The site: it is built without a warning, loads nothing from a network, and a browser draws each
page, light, dark and on a narrow screen.
"""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.documents import PAGES, ROOT, headings
from tests.helpers.commands import completed
from tests.report.browser import draw, needs_chromium

SITE = ROOT / "scripts" / "site"
WIDTHS = (1280, 400)  # CSS pixels
SCHEMES = {"light": "1", "dark": "0"}  # of Chromium's preferredColorScheme
OWN_HOST = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
TOGETHER = 6  # pages in one document
# Writes down what is in each frame, once all are loaded.
LOOK = """<!doctype html><pre id="seen"></pre>%s<script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const inside = frame.contentDocument, view = frame.contentWindow
    const article = inside.querySelector("article")
    return {
      page: frame.dataset.page, width: frame.clientWidth,
      title: article ? article.querySelector("h1").firstChild.textContent : "",
      beyond: inside.documentElement.scrollWidth - frame.clientWidth,
      broken: [...inside.images].filter(image => !image.naturalWidth).map(image => image.src),
      scheme: inside.body.getAttribute("data-md-color-scheme"),
      color: view.getComputedStyle(inside.body).backgroundColor,
      words: article ? article.innerText.split(/\\s+/).length : 0,
      loaded: view.performance.getEntriesByType("resource").map(each => each.name),
    }
  })
  document.getElementById("seen").textContent = JSON.stringify(seen)
})
</script>"""
FRAME = (
    '<iframe data-page="{page}" src="{page}.html" '
    'style="width: {width}px; height: 900px; border: 0"></iframe>'
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="pip install 'hf-zero[docs]'")
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "HF_ZERO_VENV": sys.prefix}
    relative = os.path.relpath(folder)  # from here, not from the configuration of mkdocs
    built = completed([ROOT / "scripts" / "docs", relative], timeout=300, env=env)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    assert built.stdout.splitlines()[-1] == str(folder / "index.html")
    return folder


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_menu_has_every_page() -> None:
    (menu,) = [
        value
        for name, value in yaml.safe_load((SITE / "mkdocs.yml").read_text()).items()
        if name == "nav"
    ]
    named = re.findall(r"'([a-z-]+)\.md'|([a-z-]+)\.md", str(menu))
    assert {first or second for first, second in named} == {*PAGES}


@needs_chromium
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_page_is_drawn(site: Path, tmp_path: Path, scheme: str) -> None:
    names, seen = [*PAGES], []
    for page in PAGES:
        text = (site / f"{page}.html").read_text()
        assert re.findall(r'(?:src|href)="(https?:|//)[^"]*\.(?:js|css|woff2?)', text) == []
    with served(site) as address:
        for first in range(0, len(names), TOGETHER):
            frames = (
                FRAME.format(page=page, width=width)
                for page in names[first : first + TOGETHER]
                for width in WIDTHS
            )
            (site / "look.html").write_text(LOOK % "".join(frames))
            document, said = draw(
                f"{address}/look.html",
                tmp_path / f"home-{first}",
                OWN_HOST,
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                seconds=0,
            )
            assert [line for line in said if "ERROR" in line.upper()] == []
            found = re.search(r'<pre id="seen">(.+?)</pre>', document, re.DOTALL)
            assert found is not None, said
            seen += json.loads(html.unescape(found[1]))
    assert {(each["page"], each["width"]) for each in seen} == {
        (page, width) for page in PAGES for width in WIDTHS
    }
    for each in seen:
        assert each["title"] == headings(each["page"])[0][1], each
        assert each["beyond"] <= 0 and each["broken"] == [] and each["words"] > 100, each
        assert each["scheme"] == {"light": "default", "dark": "slate"}[scheme]
        assert (each["color"] == "rgb(255, 255, 255)") == (scheme == "light"), each
        assert all(name.startswith("http://127.0.0.1") for name in each["loaded"]), each


@needs_chromium
def test_the_search_works_without_a_server(site: Path, tmp_path: Path) -> None:
    (site / "find.html").write_text((site / "index.html").read_text())
    document, _ = draw(f"file://{site}/find.html?q=nvme_path", tmp_path / "home")
    results = document.partition('class="md-search-result__list"')[2]
    assert "offload.html" in results
