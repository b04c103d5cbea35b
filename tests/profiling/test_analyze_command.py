"""`ddpopt analyze`: what it prints, its JSON, and its page."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_reports import Report
from test_analysis import unpacked
from typer.testing import CliRunner

from lightning_ddpopt.cli import app
from lightning_ddpopt.profiling.figures import rate


def reports(folder: Path, reduced: tuple[float, float] = (50, 90)) -> list[str]:
    folder.mkdir(exist_ok=True)
    made = []
    for rank in (0, 1):
        report = Report()
        report.step(0, 0, all_reduce=(reduced[0] + 10 * rank, reduced[1]))
        made.append(str(report.write(folder / f"rank_{rank}.sqlite")))
    return made


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["analyze", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def line(output: str, start: str) -> list[str]:
    found = [row for row in output.splitlines() if row.startswith(start)]
    assert found, output
    return re.split(r"  +", found[0].strip())


def test_tables(tmp_path: Path) -> None:
    output = run(*map(str, unpacked(tmp_path, "noview_rank?.json.gz")))
    assert line(output, "all") == ["all", "62.70", "0.52", "11.75", "50.15", "0.28", "0.00", "17.46", "2.98"]
    assert "48.49 (77.2 %)" in output  # communication of rank 0, of which
    assert "46.98 (74.8 %)" in output  # it waits, and of which
    assert "1.51 (2.4 %)" in output  # it transfers
    assert line(output, "0 AllReduce")[1] == "29.972"
    assert "gradient_copies: 152 device-to-device copies a step of 336.5 MiB" in output


def test_before_and_after(tmp_path: Path) -> None:
    after, before = reports(tmp_path / "after"), reports(tmp_path / "before", reduced=(70, 124))
    output = run(*after, "--baseline", str(tmp_path / "before"))
    assert line(output, "exposed") == ["exposed", "0.05", "0.02", "-0.03"]
    assert run(*after, "--baseline", before[0], "--baseline", before[1]) == output


def test_json(tmp_path: Path) -> None:
    reports(tmp_path / "before", reduced=(70, 120))
    told = json.loads(run(*reports(tmp_path / "after"), "--json", "--baseline", str(tmp_path / "before")))
    assert told["schema"] == told["baseline"]["schema"] == 1
    assert told["mean"]["exposed_ms"] == pytest.approx(0.020)
    assert told["baseline"]["mean"]["exposed_ms"] == pytest.approx(0.045)
    assert [rank["late_ms"] for rank in told["ranks"]] == [0, pytest.approx(0.010)]
    assert told["straggler"] == 1
    assert "one_bucket" in [finding["rule"] for finding in told["baseline"]["findings"]]


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["analyze", str(tmp_path / "none.json")], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert "none.json: no such file" in done.output
    assert "Traceback" not in done.output


def test_a_page_in_no_folder_is_said_before_the_work(tmp_path: Path) -> None:
    """Though the trace is none either, the page's folder is what is told of."""
    arguments = ["analyze", str(tmp_path / "none.json"), "--html", str(tmp_path / "no" / "page.html")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert "there is no folder" in done.output
    assert "no such file" not in done.output


@pytest.mark.parametrize(("gb_per_s", "text"), [(230.04, "230.0"), (1, "1.0"), (0.0123, "0.012"), (0, ""), (None, "")])
def test_small_bandwidths_keep_their_digits(gb_per_s: float | None, text: str) -> None:
    assert rate(gb_per_s) == text


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def widths(picture: ElementTree.Element, colour: str) -> float:
    bars = picture.findall(f".//rect[@fill='var(--{colour})']")
    return sum(float(bar.attrib["width"]) for bar in bars)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(*map(str, unpacked(tmp_path, "cap2000_rank?.sqlite.gz")), "--html", str(page))
    text = page.read_text()
    parsed = Parsed(text)
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert not {"src", "href"} & set(parsed.attributes)
    assert "http" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert parsed.tags.count("svg") == 2
    assert "All gradients are reduced in one collective" in text
    assert "DDPOptStrategy(bucket_cap_mb=10); try 25, 50, 100 too" in text


def test_the_timeline_is_to_scale(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(*reports(tmp_path), "--html", str(page))
    first, second = pictures(page.read_text())
    scale = (1300 - 122 - 10) / 100  # of the picture's units in a step of 100 us
    assert widths(first, "compute") == pytest.approx(69 * scale, abs=0.1)
    assert widths(first, "hidden") == pytest.approx(40 * scale, abs=0.1)
    assert widths(first, "exposed") == widths(first, "shade") == pytest.approx(20 * scale, abs=0.1)
    assert widths(first, "wait") == pytest.approx(10 * scale, abs=0.1)
    assert widths(second, "wait") == 0
    assert widths(second, "hidden") == pytest.approx(30 * scale, abs=0.1)
    assert widths(first, "backward") == pytest.approx(60 * scale, abs=0.1)


def test_the_page_shows_before_and_after_on_one_scale(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    reports(tmp_path / "before", reduced=(70, 120))
    run(*reports(tmp_path / "after"), "--baseline", str(tmp_path / "before"), "--html", str(page))
    text = page.read_text()
    before, _, after, _ = pictures(text)
    assert widths(after, "backward") / widths(before, "backward") == pytest.approx(60 / 90, abs=0.001)
    assert text.index("<h3>Before</h3>") < text.index("<h3>After</h3>")
    assert "before 0.0 ms" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    report = Report()
    report.step(0, 0)
    page = tmp_path / "page.html"
    run(str(report.write(tmp_path / "<b>&rank_0.sqlite")), "--html", str(page))
    assert "&lt;b&gt;&amp;rank_0.sqlite" in page.read_text()


def test_profiling_imports_no_torch() -> None:
    modules = "alignment analysis copies events figures findings kineto nsys_export overlap page phases tables traces"
    code = "import sys; " + "; ".join(f"import lightning_ddpopt.profiling.{name}" for name in modules.split())
    checked = f"{code}; sys.exit(bool({{'torch', 'lightning'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", checked], check=True, timeout=60)
