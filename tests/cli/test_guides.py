"""`aio-elastic help`: the pages that are installed with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from elastic_aio.cli import guides, main
from elastic_aio.cli.guides import Anchor, anchors_of, find_pages, sections

REPOSITORY = Path(guides.__file__).parent.parent.parent
PARTS = ("docs/guides", "docs/reference")
BACKGROUND = ("docs/guarantees.md", "docs/architecture.md")


def test_the_report_of_a_failure_names_a_page_that_is_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--no-python", "false"]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("Help: aio-elastic ")
    assert main(last.split()[2:]) == 0
    page = (REPOSITORY / "docs/guides/failures.md").read_text()
    assert capfd.readouterr() == (page, "")


def test_all_pages_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("usage: aio-elastic run ")
    assert "\n  failures               Why a job failed\n" in shown
    assert "\n  events-reference       Events\n" in shown
    assert "\n  guarantees             Guarantees\n" in shown
    files = {str(path) for part in PARTS for path in (REPOSITORY / part).glob("*.md")}
    assert set(find_pages().values()) == files | {str(REPOSITORY / page) for page in BACKGROUND}


def test_a_command_has_its_options_as_its_page(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["help", "jobs"])
    assert caught.value.code == 0
    assert capfd.readouterr().out.startswith("usage: aio-elastic jobs ")


def test_a_topic_that_is_near(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "failure"]) == 2
    problem = "must be a page or a command: `aio-elastic help` lists them; did you mean failures?"
    assert capfd.readouterr().err.startswith(f"aio-elastic help: PAGE: {problem}; pages with ")


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("Preemption", "stopping"),
        ("Exclude", "many-nodes"),
        ("core file", "failures"),
        ("logrotate", "logs"),
        ("systemd", "services"),
        ("kubernetes", "exit-codes"),
    ],
)
def test_a_word_leads_to_the_pages_that_have_it(
    word: str, page: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", word]) == 2
    found = capfd.readouterr().err.partition("pages with this word: ")[2]
    assert page in found.partition(" (got ")[0].split(", ")


@pytest.mark.parametrize("word", ["nosuchwordanywhere", " ", ""])
def test_a_word_that_no_page_has(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", word]) == 2
    assert "pages with" not in capfd.readouterr().err


def test_a_package_without_its_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guides, "__file__", str(tmp_path / "elastic_aio/cli/guides.py"))
    assert main(["help", "failures"]) == 1
    problem = "the pages of the documentation are not installed"
    assert capfd.readouterr().err == f"aio-elastic help: {problem}\n"


def test_an_installed_package_has_them_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "elastic_aio/docs/guides/failures.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Title\n")
    monkeypatch.setattr(guides, "__file__", str(tmp_path / "elastic_aio/cli/guides.py"))
    assert find_pages() == {"failures": str(page)}
    built = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = built["targets"]["wheel"]["force-include"]
    assert included == {part: f"elastic_aio/{part}" for part in (*PARTS, *BACKGROUND)}


PAGE = """\
# Title

| option | meaning |
|---|---|
| `-t`, `--tee STREAMS` | text |

## A part, of `it`

```
## no heading
| `no` | row |
```

| field of `stop` | meaning |
|---|---|
| `linger` | seconds |
| `plan` | see `other` |

### Below

| code | meaning |
|---|---|
| 75 | first |
| 126, 127 | second |
| 128 + n | signal |
| 75 | third |

## End
"""


def test_the_anchors_of_a_page() -> None:
    assert [*anchors_of(PAGE)] == [
        Anchor("title", 0, 1, 0),
        Anchor("-t", 4, 0, 2),
        Anchor("--tee", 4, 0, 2),
        Anchor("a-part-of-it", 6, 2, 0),
        Anchor("stop.linger", 15, 0, 13),
        Anchor("stop.plan", 16, 0, 13),
        Anchor("below", 18, 3, 0),
        Anchor("75", 22, 0, 20),
        Anchor("126", 23, 0, 20),
        Anchor("127", 23, 0, 20),
        Anchor("75", 25, 0, 20),
        Anchor("end", 27, 2, 0),
    ]


def test_sections_of_a_page() -> None:
    (part,) = sections(PAGE, "a-part-of-it")
    assert part.startswith("## A part")
    assert part.endswith("| 75 | third |\n")
    assert sections(PAGE, "end") == ["## End\n"]
    assert sections(PAGE, "no") == sections(PAGE, "other") == []
    head = "| code | meaning |\n|---|---|\n"
    assert sections(PAGE, "75") == [f"### Below\n\n{head}| 75 | first |\n| 75 | third |\n"]
    assert sections(PAGE, "--tee")[0].startswith("# Title\n\n| option |")


@pytest.mark.parametrize("words", [["failures", "known-causes"], ["failures#known-causes"]])
def test_a_section_is_printed_alone(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("## Known causes\n")
    assert "\n## " not in shown


def test_a_section_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "failures", "known-cause"]) == 2
    problem = "must be a heading of the page, or a name in its tables; did you mean known-causes?"
    assert capfd.readouterr().err.startswith(f"aio-elastic help: SECTION: {problem} (got ")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("--no-record", "| `--no-record` |"),
        ("preemption", "| `preemption` | `PreemptionSpec()` |"),
        ("stop.linger", "| `linger` | 0 |"),
        ("WorkerExited", "| `WorkerExited` |"),
        ("75", "| 75 |"),
        ("LOCAL_RANK", "| `LOCAL_RANK` |"),
    ],
)
def test_the_name_in_an_error_has_its_row(
    name: str, row: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its pages follow, as for another word."""
    assert main(["help", name]) == 0
    shown = capfd.readouterr().out
    assert f"\n{row}" in shown
    assert shown.splitlines()[-1].startswith("Pages with this word: ")
