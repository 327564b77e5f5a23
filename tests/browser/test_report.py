"""`braid report` in a real Chromium: what is drawn, what filters find, keys, sizes, access."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as compute
import pyarrow.parquet as parquet
import pytest

from pipeline import cli
from pipeline.run.run import Run
from tests.browser.reported_run import EXPERT, FIRED, GROUP, HOSTILE, PROMPTS, STEPS, write_reported
from tests.chromium import opened, screenshot, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = ("verdict", "curves", "samples", "versus", "merge", "routing", "time", "lineage", "runs")
AXE = Path(__file__).parent / "vendor" / "axe" / "axe.min.js"
SAMPLES = STEPS * PROMPTS * GROUP


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("reported")
    write_reported(folder / "other", name="other", seed=7)
    return write_reported(folder / "small")


def written(run: Run, *options: str, others: tuple[str, ...] = ()) -> Path:
    """Write the run's report and return its file."""
    path = run.path.parent / f"{len(options)}{'-'.join(options)[:20].replace('/', '_')}.html"
    arguments = ["--runs-dir", str(run.path.parent), "--output", str(path)]
    assert cli.main(["report", "small", *others, *arguments, *options]) == 0
    return path


@pytest.fixture(scope="module")
def report(run: Run) -> Path:
    return written(run, others=("other",))


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as found:
        yield found


def number(text: str | None) -> int:
    """Return the first whole number of a text."""
    found = re.search(r"\d+", text or "")
    assert found is not None
    return int(found[0])


def cells(page: Page, label: str) -> list[list[str]]:
    """Return the rows of a table, without its headings."""
    rows = page.locator(f"[aria-label='{label}'] tbody tr")
    return [row.locator("td").all_inner_texts() for row in rows.all()]


@pytest.mark.parametrize(
    ("look", "width"), [("light", 1280), ("dark", 1280), ("light", 400)], ids=str
)
def test_every_page_is_drawn_accessible_and_no_wider_than_the_window(
    look: str, width: int, browser: Browser, report: Path
) -> None:
    with opened(browser, report, width, dark=look == "dark") as page:
        page.add_script_tag(content=AXE.read_text())
        for name in PAGES:
            visit(page, name)
            screenshot(page, f"{name}-{look}-{width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            found: list[dict[str, Any]] = page.evaluate("axe.run().then((all) => all.violations)")
            serious = [each for each in found if each["impact"] in ("serious", "critical")]
            assert not serious, (name, [(each["id"], each["nodes"][0]["html"]) for each in serious])


def coloured_pixels(page: Page, metric: str) -> int:
    """Return how many pixels of a chart are neither grey nor transparent."""
    return int(
        page.evaluate(
            """(metric) => {
              const canvas = document.querySelector(`[data-metric="${metric}"] canvas`);
              const pen = canvas.getContext("2d");
              const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
              let count = 0;
              for (let at = 0; at < data.length; at += 4) {
                const [red, green, blue, alpha] = data.slice(at, at + 4);
                if (alpha && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) count++;
              }
              return count;
            }""",
            metric,
        )
    )


def test_every_metric_has_a_chart_with_all_its_values(page: Page) -> None:
    visit(page, f"curves/{EXPERT}")
    charts = page.locator("#charts figure")
    names = {chart.get_attribute("data-metric") for chart in charts.all()}
    assert names == {"loss", "reward", "entropy", "kl", "seconds_rollout", "seconds_train"}
    for chart in charts.all():  # of this run and of the other one
        assert chart.get_attribute("data-points") == str(2 * STEPS)
        assert coloured_pixels(page, chart.get_attribute("data-metric") or "") > 100
    caption = page.locator("[data-metric=entropy] figcaption").inner_text()
    assert f"fired at step {FIRED + 4}" in caption  # patience is 5
    assert page.get_by_text("attempt 2 running: from step 20").count() == 1
    marks = page.locator("#marks").inner_text()
    assert marks.endswith("upright: the guard fired; dotted: the stage was interrupted")


def test_history_and_times_are_read_at_a_glance(page: Page) -> None:
    visit(page, "verdict")
    [row] = [row for row in cells(page, "Stages") if row[0].endswith(f" {EXPERT}")]
    assert row[5] == "2 min 01 s"
    visit(page, "lineage")
    assert [row[3] for row in cells(page, "History") if row[0] == EXPERT][-1] == "done"


def test_the_outcome_and_a_curve_of_each_stage_are_above_the_fold(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    visit(page, "verdict")
    for label in ("Accuracy", "Stages"):
        box = page.locator(f"[aria-label='{label}']").bounding_box()
        assert box is not None and box["y"] < 600
    curve = {row[0].split()[-1]: row[2] for row in cells(page, "Stages")}
    assert curve[EXPERT] == "reward 0.138 → 0.887"  # means of its first and last quarter
    assert curve["merge"].startswith("teacher_kl ")
    assert page.locator("[aria-label='Stages'] svg polyline").count() == 2
    heights = {row.bounding_box()["height"] for row in page.locator("td .done").all()}  # type: ignore[index]
    assert len(heights) == 1  # a state is one line, also beside a long cause


def test_curves_are_in_panels_and_a_policy_gradient_s_loss_is_last(page: Page) -> None:
    visit(page, f"curves/{EXPERT}")
    assert page.locator("#charts h2").all_inner_texts() == ["learning", "policy", "cost"]
    learning, policy, _ = page.locator("#charts .charts").all()
    names = [chart.get_attribute("data-metric") for chart in learning.locator("figure").all()]
    assert names == ["reward", "loss"]
    names = [chart.get_attribute("data-metric") for chart in policy.locator("figure").all()]
    assert names == ["entropy", "kl"]


def test_curves_are_smoothed_unless_told_not_to(page: Page) -> None:
    visit(page, f"curves/{EXPERT}")
    assert page.evaluate("movingMean([1, 2, 6, null, 3], 3)") == [1.5, 3, 4, None, 3]
    smoothed = page.locator("[data-metric=reward] canvas").screenshot()
    page.locator("#smooth").uncheck()
    page.wait_for_function("location.hash.includes('smooth=no')")
    page.wait_for_selector("[data-metric=reward][data-drawn]")
    assert page.locator("[data-metric=reward] canvas").screenshot() != smoothed


TURNS = {
    "<|im_start|>system\nTools<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    "B<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n": "2 + 2?",
    "<s> [INST] 2 + 2? [/INST]": "2 + 2?",
    "[gMASK]<sop><|system|>\nTools<|user|>\n2 + 2?<|assistant|>\n": "2 + 2?",
    "<\uff5cUser\uff5c>2 + 2?<\uff5cAssistant\uff5c><think>": "2 + 2?",
    "<|start|>system<|message|>Tools<|end|><|start|>user<|message|>2 + 2?<|end|>": "2 + 2?",
    "c2+2=": "c2+2=",
}


def test_the_list_of_samples_shows_the_last_user_turn_and_what_was_expected(page: Page) -> None:
    for prompt, turn in TURNS.items():
        assert page.evaluate("(prompt) => lastUserTurn(prompt)", prompt) == turn
    visit(page, f"samples/{EXPERT}?solved=no")
    option = page.locator("#samples [role=option]").first.inner_text()
    assert len(option.splitlines()) == 4
    assert option.splitlines()[3].startswith("expected ")


def test_colours_of_phases_differ_and_are_seen_on_both_grounds(
    browser: Browser, report: Path
) -> None:
    with opened(browser, report, dark=True) as page:
        phases = page.evaluate("({...PHASE_COLOURS, other: OTHER_PHASES})")
        visit(page, "routing/merge")
        assert "the brighter, the more tokens" in page.locator("#expert").inner_text()
    assert len(set(phases.values())) == len(phases)
    for name, colour in phases.items():
        light, dark = (contrast(colour, ground) for ground in ("#ffffff", "#11161c"))
        assert min(light, dark) > 2, name


def contrast(one: str, other: str) -> float:
    """Return the ratio of two colours' luminances, as WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (
            x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in shares
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, brighter = sorted((luminance(one), luminance(other)))
    return (brighter + 0.05) / (darker + 0.05)


def test_a_table_on_a_phone_scrolls_beside_its_first_column(browser: Browser, report: Path) -> None:
    with opened(browser, report, 390) as page:
        visit(page, "verdict")
        table = page.locator("[aria-label='Stages']")
        assert table.evaluate("(shown) => shown.scrollWidth > shown.clientWidth")
        table.evaluate("(shown) => { shown.scrollLeft = 200; }")
        name = table.locator("tbody td").first
        box, whole = name.bounding_box(), table.bounding_box()
        assert box is not None and whole is not None and box["x"] == whole["x"]


def test_a_choice_is_in_the_address_that_is_mailed(page: Page) -> None:
    visit(page, "routing/merge")
    page.locator("#step").fill("0")
    page.wait_for_function("location.hash.includes('at=0')")
    assert "step 1," in page.locator("#expert").inner_text()
    visit(page, f"samples/{EXPERT}?search=%5Eright%2030%200")
    page.locator("#colouring").select_option("entropies")
    page.wait_for_function("location.hash.includes('colour=entropies')")
    page.locator("#samples").press("j")
    assert page.locator("#colouring").input_value() == "entropies"


def test_one_metric_of_all_stages_is_in_one_chart(page: Page) -> None:
    visit(page, "curves/all%20stages?metric=teacher_kl")
    assert {row[0] for row in cells(page, "teacher_kl")} == {"merge", "merge /sums", "merge /words"}
    assert page.locator("#charts figure").get_attribute("data-points") == str(3 * STEPS)


FILTERS: dict[str, compute.Expression] = {
    "step=3": compute.field("step") == 3,
    "step=3+17": compute.field("step").isin([3, 17]),
    "solved=no": ~compute.field("solved"),
    "finish_reason=length": compute.field("finish_reason") == "length",
    "reward=1": compute.field("reward") == 1,
    "search=%5Ewrong+2": compute.match_substring_regex(compute.field("response"), "^wrong 2"),
    "step=5&solved=yes": (compute.field("step") == 5) & compute.field("solved"),
}


@pytest.mark.parametrize("asked", FILTERS)
def test_filters_find_as_many_as_arrow_does(asked: str, page: Page, run: Run) -> None:
    table = parquet.read_table(run.stage(EXPERT).rollouts, use_threads=False)
    visit(page, f"samples/{EXPERT}?{asked}")
    expected = table.filter(FILTERS[asked]).num_rows
    assert 0 < expected < SAMPLES
    assert number(page.locator("#count").inner_text()) == expected


def test_a_sample_is_reached_by_keys_alone(page: Page) -> None:
    page.keyboard.press("3")
    page.wait_for_selector("body[data-page=samples]")
    page.keyboard.press("/")
    page.keyboard.type("^right 30 3")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.getElementById('count').textContent.startsWith('3 ') ||"
        " document.body.dataset.drawn.includes('search')"
    )
    page.keyboard.press("Escape")
    count = number(page.locator("#count").inner_text())
    seen = []
    for _ in range(count):
        seen.append(page.locator("#response").inner_text())
        page.keyboard.press("j")
        page.wait_for_timeout(50)
    assert len(set(seen)) == count
    assert all(text.startswith("right 30 3") for text in seen)
    page.keyboard.press("m")
    page.keyboard.press("k")
    page.wait_for_selector("#difference")
    page.keyboard.press("1")
    page.wait_for_selector("body[data-page=verdict]")


def test_text_of_a_model_is_never_read_as_html(page: Page) -> None:
    visit(page, f"samples/{EXPERT}?search=%3C/script%3E")
    assert page.locator("#response").inner_text() == HOSTILE
    assert page.locator("img").count() == 0


def test_a_redacted_report_has_no_texts(run: Run, browser: Browser) -> None:
    path = written(run, "--redact")
    with opened(browser, path) as page:
        visit(page, f"samples/{EXPERT}")
        assert page.locator("#response").count() == 0
        data = page.evaluate("JSON.stringify(opened)")
    for text in ("prompt 0", "wrong 1", "expected ", "cold_start says"):
        assert text not in data


def test_of_many_samples_those_of_some_prompts_are_kept_whole(run: Run, browser: Browser) -> None:
    with opened(browser, written(run, "--samples", "300")) as page:
        visit(page, f"samples/{EXPERT}")
        text = page.locator("#count").inner_text()
        data = page.evaluate("opened.samples")
    assert f"the stage recorded {SAMPLES}, and those of " in text
    assert sum(len(own["columns"]["step"]) for own in data.values()) <= 300
    table = parquet.read_table(run.stage(EXPERT).rollouts, columns=["problem"], use_threads=False)
    recorded = Counter(table["problem"].to_pylist())
    own = data[EXPERT]
    kept = Counter(own["names"]["problem"][number] for number in own["columns"]["problem"])
    assert kept and all(recorded[problem] == count for problem, count in kept.items())
    answers = data["evaluate"]
    by_model = Counter(answers["columns"]["model"])
    assert len(by_model) == 2 and len(set(by_model.values())) == 1


def test_a_printed_report_has_no_controls(page: Page) -> None:
    page.emulate_media(media="print")
    visit(page, "samples")
    assert not page.locator("nav").is_visible()
    assert not page.locator("#filters").is_visible()
    assert page.locator("#sample").is_visible()


ADDRESSES = ("%", "%ff/x", "constructor", "__proto__/x", "toString", "curves/constructor", "time/%")


def test_any_address_and_any_name_of_a_metric_draws_a_page(run: Run, browser: Browser) -> None:
    """Keys that every object of JavaScript inherits, and what `decodeURIComponent` refuses."""
    copy = run.path.parent / "named" / "small"
    shutil.copytree(run.path, copy)
    names = ["toString", "constructor", "__proto__", "valueOf", "a/__proto__"]
    values = dict.fromkeys(names, 0.5)
    lines = [{"step": n, "time": 1.7e9 + n, **values, "loss": 1.0} for n in (1, 2, 3)]
    many = {f"metric {n}": 1.0 for n in range(10_000)}
    for stage, more in ((EXPERT, {}), ("merge", many)):
        text = "".join(json.dumps({**line, **more}) + "\n" for line in lines)
        (copy / "stages" / stage / "metrics.jsonl").write_text(text)
    path = copy.parent / "report.html"
    assert cli.main(["report", str(copy), "--output", str(path)]) == 0
    with opened(browser, path) as page:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        for address in ADDRESSES:
            page.evaluate("(address) => { location.hash = `#/${address}`; }", address)
            page.wait_for_function(f"document.body.dataset.drawn === '#/{address}'")
            assert page.locator("main").inner_text()
        visit(page, f"curves/{EXPERT}")
        charts = page.locator("#charts figure")
        drawn = {chart.get_attribute("data-metric") for chart in charts.all()}
        assert drawn == {*names, "loss"}
        visit(page, "curves/all%20stages?metric=toString")
        assert page.locator("#charts figure").get_attribute("data-points") == "6"
        visit(page, "curves/merge")
        assert page.locator("#drawn").inner_text() == "200 of 10006 metrics"
        assert charts.count() == 200
        assert errors == []
