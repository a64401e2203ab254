"""The web page in a real browser: Debian's Chromium without a screen.

Pictures are kept in EDGELLM_SCREENSHOTS, for people to look at.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

from edgellm import LLM
from edgellm.conversation import template_of
from edgellm.engine import AsyncLLM
from edgellm.server.safety import Guard
from edgellm.server.service import Service

pytestmark = pytest.mark.slow
webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

QUESTION = "What is a river?"


@pytest.fixture(scope="module")
def browser():
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage",
                 "window-size=1000,900"):  # fmt: skip
        options.add_argument("--" + flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def slow_server(start):
    """Steps take long enough for a person to stop them."""
    server = start(n_ctx=1024, max_num_seqs=4)
    server.llm.on("output", lambda rows: time.sleep(0.02))
    return server


class Page:
    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.get_log("browser")
        driver.get(url)
        self.wait(lambda: self.js("return $('model').options.length"))

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def at(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, text):
        [button] = [b for b in self.at("button") if b.text == text and b.is_displayed()][-1:]
        button.click()

    def wait(self, condition, seconds=20):
        WebDriverWait(self.driver, seconds, 0.02).until(lambda _: condition())

    def ask(self, text):
        self.at("#question")[0].send_keys(text + Keys.ENTER)

    def done(self):
        self.wait(lambda: self.at("#send")[0].is_displayed())

    def answers(self):
        return [e.text for e in self.at(".assistant .text")]

    def picture(self, name):
        folder = os.environ.get("EDGELLM_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(f"{folder}/{name}.png")

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def page(browser, slow_server):
    return Page(browser, slow_server.url)


def settings(page, **values):
    page.press("Settings")
    for name, value in values.items():
        field = page.at(f"#set-{name}")[0]
        field.clear()
        field.send_keys(str(value))
    page.press("Done")


def test_a_question_is_answered_while_it_is_watched(page, slow_server):
    settings(page, max_tokens=40, temperature=0)
    page.ask(QUESTION)
    page.wait(lambda: page.answers() and page.answers()[0])
    early = page.answers()[0]
    assert page.at("#stop")[0].is_displayed() and not page.at("#send")[0].is_displayed()
    assert not page.at(".assistant .actions")
    page.wait(lambda: "1 running" in page.at("#figures")[0].text)
    page.picture("streaming")
    page.done()
    assert len(page.answers()[0]) > len(early)
    assert "tokens/s" in page.at("#figures")[0].text
    assert "40 tokens" in page.at(".assistant .actions")[0].text
    assert "limit of tokens" in page.at(".error")[0].text
    assert page.at(".user .text")[0].text == QUESTION
    page.picture("answer")
    # the same conversation after a reload, and with the next question
    answer = page.answers()[0]
    page.driver.refresh()
    assert page.answers() == [answer]
    page.ask("And a lake?")
    page.done()
    assert len(page.answers()) == 2 and page.complaints() == []


def test_stop_ends_the_answer_at_the_server(page, slow_server):
    def escape():
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)

    for stop in (page.at("#stop")[0].click, escape):
        page.ask(QUESTION)
        page.wait(lambda: page.answers() and page.answers()[-1])
        page.js("document.activeElement.blur(); document.body.focus()")
        stop()
        page.done()
        assert "Stopped." in page.at(".error")[-1].text
        slow_server.until(slow_server.is_idle)
    assert page.at("#question")[0] == page.driver.switch_to.active_element


def test_regenerate_and_edit_ask_again(page):
    settings(page, max_tokens=6, temperature=1.5)
    page.ask(QUESTION)
    page.done()
    first = page.answers()
    for _ in range(5):  # the same six tokens by chance are unlikely
        page.press("Regenerate")
        page.done()
        if page.answers() != first:
            break
    assert len(page.answers()) == 1 and page.answers() != first
    page.ask("Second")
    page.done()
    page.at(".user .actions button:nth-child(2)")[0].click()
    box = page.driver.switch_to.active_element
    assert box.get_attribute("value") == QUESTION
    box.send_keys(Keys.ESCAPE)
    assert len(page.answers()) == 2
    page.at(".user .actions button:nth-child(2)")[0].click()
    box = page.driver.switch_to.active_element
    box.clear()
    box.send_keys("Edited" + Keys.ENTER)
    page.done()
    assert [e.text for e in page.at(".user .text")] == ["Edited"] and len(page.answers()) == 1
    page.press("New chat")
    assert page.at(".message") == []


def test_what_is_set_is_sent(page, slow_server):
    sent = page.driver.execute_async_script(
        """const done = arguments[0], real = window.fetch;
        settings = {system: "Be brief.", temperature: 0.3, top_k: 7, seed: 5, max_tokens: 2};
        window.fetch = (url, options) => {
          if (!String(url).includes("completions")) return real(url, options);
          window.fetch = real;
          done(JSON.parse(options.body));
          return real(url, options);
        };
        ask("Hello");"""
    )
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
    ]  # fmt: skip
    assert (sent["temperature"], sent["top_k"], sent["seed"], sent["model"]) == (0.3, 7, 5, "tiny")
    assert "top_p" not in sent
    page.done()


def test_another_model_answers_when_it_is_chosen(browser, start, tiny_model, tmp_path):
    server = start(n_ctx=512)
    other = tmp_path / "other.gguf"
    shutil.copy(tiny_model("qwen2", template="{{ messages[-1].content }}", n_ctx=512), other)
    with LLM(other, n_ctx=512, n_threads=1) as llm, AsyncLLM(llm) as engine:
        server.models.add("other", other, Service(engine, "other", template_of(llm, None)))
        page = Page(browser, server.url)
        settings(page, max_tokens=3)
        choice = Select(page.at("#model")[0])
        assert [option.text for option in choice.options] == ["other", "tiny"]
        for name, engine_of in (("tiny", server.engine), ("other", engine)):
            before = engine_of.metrics.generation_tokens
            Select(page.at("#model")[0]).select_by_visible_text(name)
            page.ask(f"To {name}")
            page.done()
            assert engine_of.metrics.generation_tokens == before + 3
        page.picture("models")
        page.driver.refresh()
        page.wait(lambda: page.js("return $('model').value") == "other")  # the choice stays


def test_a_refusal_is_shown_and_the_key_is_asked_for(browser, start):
    server = start(guard=Guard(keys=("secret",)), n_ctx=512)
    browser.get(server.url)
    page = Page.__new__(Page)
    page.driver = browser
    page.wait(lambda: "API key" in page.at("#figures")[0].text)
    page.ask("Hi")
    page.wait(lambda: page.at(".error"))
    assert "Settings" in page.at(".error")[0].text
    settings(page, key="secret", max_tokens=3)
    page.wait(lambda: page.js("return $('model').value") == "tiny")
    page.ask("Hi")
    page.done()
    assert page.answers()[-1]


MARKDOWN = {
    "# A *b*": "<h3>A <em>b</em></h3>",
    "a **b** `c<d`": "<p>a <strong>b</strong> <code>c&lt;d</code></p>",
    "- a\n- b\n  - c\n1. d": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>"
    '<ol start="1"><li><p>d</p></li></ol>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "|a|b|\n|-|-|\n|1|2|": "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr>"
    "</table>",
    "---": "<hr>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "[x](https://a.b/c)": '<p><a href="https://a.b/c" target="_blank" '
    'rel="noopener noreferrer">x</a></p>',
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "": "",
}


def test_markdown(page):
    make = "const e = document.createElement('div'); markdown(arguments[0], e); return e.innerHTML"
    for text, html in MARKDOWN.items():
        assert page.js(make, text) == html, text
    code = page.js(make, "```html\n<b>&\n```\nafter")
    assert '<code data-language="html">&lt;b&gt;&amp;</code>' in code and "<p>after</p>" in code
    assert "<code>open" in page.js(make, "```\nopen")
    for n in range(60):  # every beginning of a text is shown, and none hangs
        page.js(make, "1. **a** `b\n   - c\n\n| d | e\n|--|\n```py\nf\n> g ~~h~~ [i](http://j"[:n])
    started = time.monotonic()
    long = [sign * 20_000 for sign in ("*", "[", "`", "_a", "~~")]
    for hostile in (*long, "> " * 2_000, "- " * 1_000):
        page.js(make, hostile)
    assert time.monotonic() - started < 20


def test_thinking_is_folded(page):
    page.js(
        "messages = [{role: 'user', content: 'q'},"
        " {role: 'assistant', content: 'a', thinking: 'hm, **so**'}]; draw()"
    )
    details = page.at("details.thinking")[0]
    assert details.get_attribute("open") is None and "hm" not in details.text
    page.at("summary")[0].click()
    assert "hm, so" in details.text


def test_colours_and_keys(page):
    assert page.js("return document.documentElement.dataset.theme") == "light"
    page.press("Dark")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    page.js(
        "messages = [{role: 'user', content: 'q'},"
        " {role: 'assistant', content: '# a\\n```\\nb\\n```'}]; draw()"
    )
    page.picture("dark")
    page.driver.refresh()
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    # everything can be reached with Tab, and is named
    reached = set()
    page.js("document.activeElement.blur()")
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        focused = page.driver.switch_to.active_element
        reached.add(focused.accessible_name)
    assert {"Model", "New chat", "Settings", "Light colours", "Message", "Send",
            "Edit this message and ask again", "Regenerate the answer"} <= reached  # fmt: skip
    page.driver.set_window_size(400, 800)
    page.picture("narrow")
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    page.driver.set_window_size(1000, 900)


def test_what_an_accessibility_checker_says(page, tmp_path):
    """axe-core, in both colours and with the settings open."""
    import subprocess

    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    get = [
        npm,
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        tmp_path,
        "axe-core@4",
    ]
    if subprocess.run(get, capture_output=True).returncode:
        pytest.skip("axe-core cannot be installed")
    axe = (tmp_path / "node_modules" / "axe-core" / "axe.min.js").read_text()
    page.js(
        "messages = [{role: 'user', content: 'q'}, {role: 'assistant', thinking: 'x', error: 'e',"
        " content: '# a\\n```\\nb\\n```\\n> c\\n\\n|d|\\n|-|\\n|e|\\n\\n[f](https://g.h)'}]; draw()"
    )
    page.js(axe)
    check = (
        "axe.run().then(found => arguments[0](found.violations.map("
        "v => [v.id, v.nodes.map(n => n.html)])))"
    )
    for prepare in ("theme('light')", "theme('dark')", "fill(); $('settings').showModal()"):
        page.js(prepare)
        assert page.driver.execute_async_script(check) == []


def test_nothing_comes_from_elsewhere(browser, slow_server):
    answer = slow_server.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "src=" not in answer.text.replace("onerror", "")
    assert slow_server.http.head("/").status_code == 200
