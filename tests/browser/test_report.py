"""The page of a run in a real browser: on a phone, on a desk, in the dark, on paper."""

import pytest

from spider.report.compare import compare
from spider.report.page import write_report
from tests.unit.evaluation.stages import mixed
from tests.unit.report.finished import finished_run


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    config, results = finished_run(folder / "results")
    write_report(config, results, "small", folder / "small.html")
    return folder / "small.html"


@pytest.fixture(params=[(390, "light"), (390, "dark"), (1280, "light")], ids=str)
def page(browser, path, request):
    """The page, opened; ``page.problems`` is what the browser complained of."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.problems, page.asked = [], []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()


def test_it_opens_without_a_complaint_and_asks_for_nothing(page, path):
    page.wait_for_load_state("networkidle")
    assert page.problems == []
    assert [url for url in page.asked if not url.startswith("data:")] == [path.as_uri()]
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert page.evaluate("window.hacked") is None


def test_nothing_is_wider_than_the_screen(page):
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    wider = """[...document.querySelectorAll('main *')].filter(one => !one.closest('.wide, .plot, .chart') &&
        one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(wider) == []


def test_letters_are_legible_and_stand_out_from_the_page(page):
    assert (
        page.evaluate("""Math.min(...[...document.querySelectorAll('main *')].filter(one => one.textContent)
        .map(one => parseFloat(getComputedStyle(one).fontSize)))""")
        >= 11
    )
    light, dark = (
        sum(map(int, page.evaluate(f"getComputedStyle(document.body).{what}").strip("rgb()").split(",")))
        for what in ("backgroundColor", "color")
    )
    assert abs(light - dark) > 450


def test_a_value_is_read_out_under_the_pointer(page):
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "bits per byte at" in page.locator(".tooltip").first.inner_text()
    page.mouse.move(1, 1)
    assert not page.locator(".tooltip").first.is_visible()


def test_it_prints_all_of_it_on_a_few_pages(page):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every(one => one.open)")
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF") and 2 <= pdf.count(b"/Type /Page\n") <= 12


def test_the_comparison_of_several_runs_is_whole_at_1200_pixels(browser, tmp_path):
    compare(mixed(tmp_path / "runs"), benchmarks=None, output=tmp_path / "report")
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    try:
        page.goto((tmp_path / "report" / "table.html").as_uri())
        wide = "[...document.querySelectorAll('.wide')].map(one => [one.scrollWidth, one.clientWidth])"
        found = page.evaluate(wide)
        assert found and all(inside <= shown for inside, shown in found)
        assert page.locator("td").last.bounding_box()["width"] > 0
    finally:
        page.close()


def test_the_legend_draws_validation_as_the_chart_does(page):
    legend = page.locator(".legend li", has_text="validation").first
    styles = [
        legend.evaluate("one => getComputedStyle(one, '::before').borderTopStyle"),
        page.locator(".plot path.dashed").first.evaluate("one => getComputedStyle(one).strokeDasharray"),
    ]
    assert styles == ["dashed", "5px, 4px"]
