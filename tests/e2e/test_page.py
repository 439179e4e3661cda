"""The page for people, in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pyarrow as pa
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from bidmatch.base.files import atomic_dir
from export.bundle.format import PHRASES
from export.bundle.read import open_bundle
from export.bundle.write import finish, write_phrases

HTML = "<img src=x onerror='window.injected=1'> & <script>window.injected=1</script>"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,800",
]


@pytest.fixture(scope="module")
def address(
    small_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[str]],
) -> Iterator[str]:
    """The small bundle with HTML for its first phrase and for that one's match type."""
    path = tmp_path_factory.mktemp("odd") / "bundle"
    with open_bundle(small_bundle) as bundle, atomic_dir(path) as folder:
        for name in bundle.manifest.files:
            if name != PHRASES:
                shutil.copyfile(small_bundle / name, folder / name)
        columns = bundle.phrases.select(["id", "text", "match_type"]).to_pydict()
        columns["text"][0] = columns["match_type"][0] = HTML
        write_phrases(folder, pa.table(columns))
        made = {"format_version", "bundle_id", "files", "checksum"}
        finish(folder, {name: value for name, value in bundle.manifest if name not in made})
    with serving(path) as url:
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    if os.environ.get("BIDMATCH_NO_BROWSER") == "1":
        pytest.skip("BIDMATCH_NO_BROWSER=1: this machine has no browser to drive")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.fail(
            "the page's tests need Chromium and its driver: apt-get install chromium chromium-driver "
            "(BIDMATCH_NO_BROWSER=1 skips them)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


class Page:
    """What a person does on the page and sees there."""

    def __init__(self, browser: WebDriver, address: str):
        self.browser = browser
        browser.get_log("browser")
        self.open(address)

    def open(self, address: str) -> None:
        self.browser.get(address)

    def all(self, selector: str) -> list:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def wait(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.browser, 15, poll_frequency=0.05).until(lambda _: condition())

    def type(self, text: str) -> None:
        box = self.one("#query")
        box.clear()
        box.send_keys(text)


@pytest.fixture
def page(browser: WebDriver, address: str) -> Iterator[Page]:
    page = Page(browser, address)
    yield page
    complaints = [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    refused = [line for line in complaints if "422 (Unprocessable" in line["message"]]
    assert complaints == refused


def test_a_person_types_a_query_and_reads_the_phrases(page: Page, address: str) -> None:
    page.type("buy outdoor garden hose\n")
    page.wait(lambda: len(page.all("#rows tr")) == 10)
    answer = httpx.get(f"{address}/match", params={"q": "buy outdoor garden hose"}).json()
    matches = answer["matches"]
    assert "outdoor garden hose" in page.texts("#rows .text")
    assert page.texts("#rows .text") == [match["phrase"] for match in matches]
    assert page.texts("#rows .score") == [f"{match['score']:.3f}" for match in matches]
    assert page.texts("#rows .encoder span") == [f"{match['parts']['encoder']:.3f}" for match in matches]
    assert page.texts("#rows .classifier span") == [
        f"{match['parts']['classifier']:.3f}" for match in matches
    ]
    for kind in ("encoder", "classifier"):
        for bar, match in zip(page.all(f"#rows .{kind} .track"), matches, strict=True):
            share = bar.find_element(By.CSS_SELECTOR, ".fill").size["width"] / bar.size["width"]
            assert share == pytest.approx(abs(match["parts"][kind]), abs=0.05)
    assert page.one("#bundle").text == answer["bundle"]
    assert page.one("#status").text.startswith("10 phrases in ")
    assert page.one("#status").text.endswith(" ms")
    assert re.search(
        r"^tokenise \d+\.\d\d ms · encode \d+\.\d\d ms · search \d+\.\d\d ms · \d+ ms seen",
        page.one("#timing").text,
    )
    page.type("BUY outdoor  garden hose\n")
    page.wait(lambda: page.one("#timing").text.startswith("from the cache · "))
    assert page.texts("#rows .text") == [match["phrase"] for match in matches]


@pytest.mark.parametrize(
    ("query", "phrase", "shown"),
    [
        ("buy blue garden hose", "blue garden hose", False),  # bought as `exact`
        ("Blue garden hose", "blue garden hose", True),
        ("where to buy cheap garden hose", "cheap garden hose", True),  # as `phrase`
        ("garden hose cheap", "cheap garden hose", False),
    ],
)
def test_phrases_are_shown_as_they_were_bought(
    page: Page, address: str, query: str, phrase: str, shown: bool
) -> None:
    page.open(f"{address}/?{urlencode({'q': query, 'k': 54})}")
    page.wait(lambda: page.all("#rows tr"))
    assert (phrase in page.texts("#rows .text")) == shown


def test_answers_come_while_typing_and_the_address_can_be_shared(page: Page, address: str) -> None:
    page.type("red running shoes")
    page.wait(lambda: page.all("#rows tr"))
    assert page.one("#rows .exact").text == "equals the query"
    assert page.one("#rows tr:first-child .text").text == "red running shoes"
    assert page.texts("#rows tr:first-child .tag")[1] in ("broad", "exact", "phrase")
    shared = page.browser.current_url
    page.open("about:blank")
    page.open(shared)
    page.wait(lambda: "red running shoes" in page.texts("#rows .text"))
    assert page.one("#query").get_property("value") == "red running shoes"


def test_text_from_the_bundle_is_never_markup(page: Page) -> None:
    page.type(HTML)
    page.wait(lambda: page.texts("#rows tr:first-child .text") == [HTML])
    assert HTML in page.texts("#rows tr:first-child .tag")
    assert page.browser.execute_script("return window.injected") is None
    assert not page.all("#rows img, #rows script")


def test_the_keyboard_is_enough(page: Page) -> None:
    body = page.one("body")
    page.one("#k").send_keys(Keys.TAB, Keys.TAB)
    body.send_keys("/")
    assert page.browser.switch_to.active_element.get_attribute("id") == "query"
    page.browser.switch_to.active_element.send_keys("ceiling fan", Keys.ENTER)
    page.wait(lambda: page.all("#rows tr"))
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.all("#rows tr"))
    assert page.one("#query").get_property("value") == ""
    assert not page.one("#matches").is_displayed()


def test_a_refusal_is_shown_and_the_next_answer_takes_its_place(page: Page) -> None:
    page.type("ceiling fan")
    page.one("#k").clear()
    page.one("#k").send_keys("0")
    page.wait(lambda: page.one("#problem").is_displayed())
    assert "k: Input should be greater than or equal to 1" in page.one("#problem").text
    page.one("#k").clear()
    page.one("#k").send_keys("3")
    page.wait(lambda: len(page.all("#rows tr")) == 3)
    assert not page.one("#problem").is_displayed()


def test_a_key_is_asked_for_where_one_is_needed(
    browser: WebDriver,
    small_bundle: Path,
    tmp_path: Path,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    """Shown after the first refusal, sent from then on, and forgotten with the tab."""
    key = "of-this-test-0123456789abcdef"
    keys = tmp_path / "api.keys"
    keys.write_text(f"page: {key}\n")
    keys.chmod(0o600)
    with serving(small_bundle, "--auth", "on", "--api-keys-file", str(keys)) as url:
        page = Page(browser, url)
        assert not page.one("#key").is_displayed()
        page.type("ceiling fan")
        page.wait(lambda: page.one("#problem").is_displayed())
        assert "key" in page.one("#problem").text
        page.one("#key").send_keys("wrong", Keys.ENTER)
        page.wait(lambda: "not known" in page.one("#problem").text)
        page.one("#key").clear()
        page.one("#key").send_keys(key, Keys.ENTER)
        page.wait(lambda: page.all("#rows tr"))
        assert not page.one("#problem").is_displayed()
        assert not page.one("#json").is_displayed()
        page.open(f"{url}/?q=garden+hose")
        page.wait(lambda: page.all("#rows tr"))
        browser.execute_script("sessionStorage.clear()")
        browser.get_log("browser")


def test_everything_has_a_name_and_nothing_comes_from_elsewhere(page: Page, address: str) -> None:
    page.type("ceiling fan")
    page.wait(lambda: page.all("#rows tr"))
    page.browser.execute_script("document.getElementById('keyed').hidden = false")
    for element in page.all("input, button, a[href]"):
        assert element.accessible_name
    assert {element.aria_role for element in page.all("#status")} == {"status"}
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert loaded
    assert all(name.startswith(f"{address}/") for name in loaded)


def test_light_and_dark(page: Page) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})  # type: ignore[attr-defined]
        rgb = page.one("body").value_of_css_property("background-color")
        grounds.append(int(rgb.split("(")[1].split(",")[0]))
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})  # type: ignore[attr-defined]
    assert grounds[0] > 200
    assert grounds[1] < 60


def test_the_documentation_is_drawn_from_the_api_description(page: Page, address: str) -> None:
    page.open(f"{address}/docs")
    page.wait(lambda: page.one("main").get_attribute("aria-busy") is None)
    titles = page.texts("h2")
    assert any(title.startswith("POST") and "/match" in title for title in titles)
    assert set(httpx.get(f"{address}/openapi.json").json()["components"]["schemas"]) <= set(titles)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_its_lines_of_curl_do_what_they_stand_beside(page: Page, address: str) -> None:
    page.open(f"{address}/docs")
    page.wait(lambda: page.one("main").get_attribute("aria-busy") is None)
    lines = page.texts("pre")
    paths = httpx.get(f"{address}/openapi.json").json()["paths"]
    assert len(lines) == sum(map(len, paths.values()))
    for line in lines:
        answered = subprocess.run(
            f"{line} -w '\\n%{{http_code}}'", shell=True, capture_output=True, text=True, check=True
        )
        answer, _, status = answered.stdout.rpartition("\n")
        # There are no live phrases here, and no phrase of that name: all that there is to find fault with.
        known = {"urn:bidmatch:live-phrases-off", "urn:bidmatch:no-such-phrase"}
        assert status == "200" or json.loads(answer)["type"] in known, (line, answer)
