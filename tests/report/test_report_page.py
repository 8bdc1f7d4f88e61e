import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import PRIVACY, Maker, images

from feddpms.errors import RunFolderError
from feddpms.report.load import find
from feddpms.report.page import page, write

NASTY = '<script>alert("x")</script>'


class Outline(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def ids(self) -> list[str | None]:
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(scope="module")
def html(three: Path) -> str:
    return page(find([three]), "Digits, three methods")


def test_the_page_says_what_was_run_and_how_to_read_it(html: str):
    text = re.sub(r"\s+", " ", Outline(html).text)

    assert "3 methods (fedavg, feddpms, moon), 4 seeds (0, 1, 2, 3): digits with 10" in text
    assert "those of the last round on the test set, never of the best round" in text
    assert "paired by seed" in text
    assert "moon, seed 3: unfinished (12 of 20 rounds)" in text
    assert "fedavg, seed 3: diverged (loss not finite in round 14)" in text
    assert "Real images are from the public test set; synthetic ones are decoded from noisy" in text
    for heading in ("Results", "Accuracy over rounds", "Loss over rounds", "Accuracy by class"):
        assert f"<h3>{heading}</h3>" in html
    for heading in ("Who holds what", "Privacy", "Where time and bytes went", "Settings"):
        assert f"<h3>{heading}</h3>" in html


def test_the_privacy_claim_is_there_word_for_word_with_the_ledger(html: str):
    assert f'<p class="claim">{PRIVACY}</p>' in html
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", html)
    at = cells.index("means")
    row = ["means", "gaussian", "10", "1.3", "0.04419", "1", "-", "add_remove", "yes"]
    assert cells[at : at + 9] == row
    at = cells.index("model")
    assert cells[at + 1 : at + 4] == ["none: in the clear", "10", "-"]


def test_a_sensitivity_that_differs_by_client_is_given_as_a_range(make: Maker):
    folder = make("feddpms")
    file = folder / "ledger.jsonl"
    file.write_text(file.read_text().replace("0.04419417", "0.125", 1))

    assert "0.04419 to 0.125" in page(find([folder]), "t")


def test_nothing_is_loaded_from_outside(html: str):
    outline = Outline(html)
    links = [
        value
        for _, attrs in outline.tags
        for key, value in attrs.items()
        if key in {"src", "href", "xlink:href", "srcset", "action", "poster", "data"} and value
    ]
    spaces = {
        value
        for _, attrs in outline.tags
        for key, value in attrs.items()
        if key.startswith("xmlns") and value
    }

    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert set(re.findall(r"https?://[^\s\"'<>)]+", html)) <= spaces
    assert "@import" not in html
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in outline.tags}
    assert "default-src 'none'" in html


@pytest.fixture(scope="module")
def both(three: Path, hundred: Path) -> str:
    return page(find([three, hundred]), "all")


def test_ids_are_unique_and_tables_and_pictures_are_named(both: str):
    outline = Outline(both)
    ids = outline.ids()
    pictures = [attrs for tag, attrs in outline.tags if tag == "svg"]

    assert len(ids) == len(set(ids))
    assert len(pictures) == 10
    assert all(p["role"] == "img" and p["aria-label"] for p in pictures)
    assert all(attrs.get("alt") for tag, attrs in outline.tags if tag == "img")
    assert all(attrs.get("scope") in {"col", "row"} for tag, attrs in outline.tags if tag == "th")


def test_runs_that_may_not_be_compared_have_tables_of_their_own(both: str):
    assert "What differs is not comparable" in both
    assert both.count("<h3>Results</h3>") == 2


def test_everything_from_a_file_is_escaped(make: Maker):
    classes = (NASTY, "<b>bird & co</b>", "truck$x$")
    make(
        NASTY,
        classes=classes,
        clients=3,
        data=NASTY,
        partition=NASTY,
        claim=NASTY,
        version=NASTY,
        settings=f"'{NASTY}' = '{NASTY.replace('(', '')}'",
        pictures=images(3, [1, 2, 3]),
        name="nasty",
    )
    ledger = make.root / "nasty" / "ledger.jsonl"
    ledger.write_text('{"channel": "<script>1</script>", "mechanism": "<script>2</script>"}\n')
    html = page(find([make.root]), NASTY)

    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("&lt;script&gt;") > 10


def test_the_same_folders_give_the_same_bytes(three: Path, html: str):
    assert page(find([three]), "Digits, three methods") == html


def test_a_hundred_classes_one_seed(hundred: Path):
    html = page(find([hundred]), "t")

    assert "One seed: the spread over seeds is unknown" in html
    assert "Only the first classes that have synthetic images are shown" in html
    assert "Numbers are mean ±" not in html
    assert len(html) < 4_000_000


def test_a_run_alone_and_unfinished_or_empty_still_makes_a_page(make: Maker):
    short = page(find([make("fedavg", change=lambda lines: lines[:4])]))
    empty = page(find([make("moon", change=lambda lines: [])]), "t")

    assert "unfinished (4 of 20 rounds)" in short
    assert "No claim: the run did not come to its end." in short
    assert "<h1>fedavg on digits</h1>" in short
    assert "<h3>Accuracy over rounds</h3>" in short
    assert "<h3>Accuracy by class</h3>" not in short
    assert "<h3>Accuracy over rounds</h3>" not in empty


def test_what_local_and_central_mean_is_said(make: Maker):
    make("local")
    make("central")
    html = page(find([make.root]), "t")

    assert "means over the clients&#39; models" in html
    assert "central trains on all clients&#39; data in one place" in html
    assert "The ledger holds no event." in html


def test_write_replaces_the_file_whole_and_leaves_nothing_else(make: Maker, tmp_path: Path):
    runs = find([make(change=lambda lines: [])])
    target = tmp_path / "report.html"
    target.write_text("old")
    write(runs, target, "t")

    assert target.read_text(encoding="utf-8").endswith("</html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "runs"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_page_that_cannot_be_written_is_one_line(make: Maker, tmp_path: Path):
    runs = find([make(change=lambda lines: [])])
    with pytest.raises(RunFolderError, match="cannot write a report at"):
        write(runs, tmp_path / "missing" / "report.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunFolderError, match="cannot write a report at"):
        write(runs, tmp_path / "taken")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs", "taken"]


def test_reports_do_without_torch():
    code = "import sys, feddpms.report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on PATH to open the page with")
def test_a_browser_shows_the_page_from_the_file_system(three: Path, tmp_path: Path):
    target = tmp_path / "report.html"
    write(find([three]), target, "Opened in a browser")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=400,3000"]
    shot = tmp_path / "page.png"
    command = [str(browser()), *flags, f"--screenshot={shot}", target.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=60)

    from PIL import Image

    picture = Image.open(shot).convert("RGB")
    colours = picture.getcolors(picture.width * picture.height) or []
    assert len(colours) > 200  # text, curves and heat maps, not a blank page
    command = [str(browser()), *flags, "--dump-dom", target.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("<svg ") == 5
    assert "Where time and bytes went" in done.stdout


def test_the_page_says_where_the_time_went(html: str):
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", html)
    start = cells.index("images/s")
    assert cells[start - 6 : start] == [
        "method",
        "phase",
        "train",
        "synthesis",
        "evaluate",
        "exchange",
    ]
    table = [cells[i : i + 7] for i in range(start + 1, start + 1 + 4 * 7, 7)]
    assert ["fedavg", "train", "80%", "0%", "10%", "10%", "5,110"] in table
    assert ["feddpms", "vae", "80%", "0%", "10%", "10%", "5,110"] in table
    assert ["feddpms", "classify", "80%", "4%", "10%", "6%", "5,110"] in table


def test_a_run_that_did_not_note_its_time_has_no_such_table(make: Maker):
    folder = make(change=lambda lines: [replace(r, timing={}) for r in lines])
    assert "images/s" not in page(find([folder]), "one run")
