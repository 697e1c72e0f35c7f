"""The page of a run in a real browser: on a phone, on a wide screen, in dark mode, in print."""

import pytest

from spider.report.page import write_report
from tests.unit.report.finished import finished_run


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    config, results = finished_run(folder / "results")
    write_report(config, results, "small", folder / "small.html")
    return folder / "small.html"


@pytest.fixture(scope="module", params=[(390, "dark"), (1280, "light")], ids=str)
def page(browser, path, request):
    """Open the page. ``page.problems`` collects errors of the browser, ``page.requested`` its requests."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.problems, page.requested = [], []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.requested.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()


def test_the_page_opens_without_errors_and_requests_no_other_file(page, path):
    page.wait_for_load_state("networkidle")
    assert page.problems == []
    assert [url for url in page.requested if not url.startswith("data:")] == [path.as_uri()]
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert page.evaluate("window.hacked") is None


def test_nothing_is_wider_than_the_screen(page):
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    wider = """[...document.querySelectorAll('main *')].filter(one => !one.closest('.wide, svg') &&
        one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(wider) == []


def test_letters_are_large_enough_and_have_contrast(page):
    sizes = """Math.min(...[...document.querySelectorAll('main *:not(svg *)')]
        .filter(one => one.textContent).map(one => parseFloat(getComputedStyle(one).fontSize)))"""
    assert page.evaluate(sizes) >= 11
    light, dark = (
        sum(map(int, page.evaluate(f"getComputedStyle(document.body).{what}").strip("rgb()").split(",")))
        for what in ("backgroundColor", "color")
    )
    assert abs(light - dark) > 450


def test_charts_are_as_wide_as_their_column(page):
    widths = page.evaluate("""[...document.querySelectorAll('figure svg')].map(one =>
        [one.getBoundingClientRect().width, one.closest('figure').getBoundingClientRect().width])""")
    assert len(widths) >= 7 and all(300 < inside <= outside + 1 for inside, outside in widths)


def test_the_page_prints_completely_on_a_few_sheets(page):
    page.emulate_media(media="print")
    assert page.evaluate("""[...document.querySelectorAll('details > *')].every(one =>
        one.getBoundingClientRect().height > 0)""")
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF") and 2 <= pdf.count(b"/Type /Page\n") <= 12
