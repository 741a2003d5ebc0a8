"""Writes the report of a run: what it says first, its sections, and the table at its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.runs.reader import read_run
from sonde.runs.report.branch_page import BRANCHES_NAME, branch_page, read_branches
from sonde.runs.report.how_measured import cut, how_measured
from sonde.runs.report.page import whole_page, write_page
from sonde.runs.report.verdicts import failed_checks, position_text, verdict_panels
from sonde.runs.run import Run
from sonde.wording import duration, moment

if TYPE_CHECKING:
    from sonde.runs.report.figures import Section


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, or of branches from one checkpoint.

    Args:
        run_path: the run's folder, or its `.jsonl` file; or the folder of `sonde branch`, or its `branches.json`.
        out: the file to write; `report.html` beside the log by default. An older report is replaced in one step.
            Any other file is left alone.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: when there is no such run.
        ValueError: when the file is not the log of a run, the log holds no reading yet, or `out` exists and is not a
            report.
        ImportError: without the `bokeh` package.
    """
    branches = Path(run_path) if Path(run_path).name == BRANCHES_NAME else Path(run_path) / BRANCHES_NAME
    if branches.is_file():
        found = read_branches(branches)
        return write_page(Path(out or branches.with_name("report.html")), lambda: branch_page(found))
    run = readable_run(run_path)
    return write_page(Path(out or run.path.parent / "report.html"), lambda: render_page(run))


def readable_run(path: str | Path) -> Run:
    """The run in a log, in which something was measured.

    Raises:
        FileNotFoundError: when there is no such run.
        ValueError: when the file is not the log of a run, or the log holds no reading yet.
    """
    run = read_run(path)
    if run.is_empty:
        every = run.probe("reading").setup.get("log_every") or "few"
        raise ValueError(
            f"{run.path} holds no reading yet, expected at least one (a run writes one every {every} windows and at "
            "its end): let the run continue, then try again"
        )
    return run


def render_page(run: Run) -> str:
    """The whole page of a run in which something was measured."""
    return whole_page(report_sections(run), source="the log of this run", **said_first(run), rows=how_measured(run))


def report_sections(run: Run) -> list[Section]:
    """The sections of a run, in order, without those of what was not asked for."""
    # Here, since Bokeh and Jinja2 are an extra, and only the page needs them.
    from sonde.runs.report.comparison_section import comparison_sections
    from sonde.runs.report.policy_sections import policy_sections
    from sonde.runs.report.sections import declared_sections, noise_scale_sections

    sections = [
        *(noise_scale_sections(run) if run.readings else []),
        *(policy_sections(run) if run.policy else []),
        *comparison_sections(run),
        *declared_sections(run),
    ]
    return [section for section in sections if any(section.content)]


def said_first(run: Run) -> dict[str, Any]:
    """What the page says before its sections: the name, what looks wrong, verdicts."""
    subjects = ["batch size and gradient noise"] if run.readings else []
    subjects += ["entropy of the policy"] if run.policy or run.comparisons else []
    panels = verdict_panels(run)
    said = tuple(panel.headline.removesuffix(".").lower() for panel in panels)
    # What a later reading found right again needs nothing done, and what a verdict says is not said twice.
    alerts = [f for f in failed_checks(run) if not (f.is_over or f.message.lower().startswith(said))]

    return {
        "name": cut(run.name, 200),
        "subject": ", ".join(subjects or [section.title for section in run.sections]),
        "facts": _facts(run),
        "alerts": alerts,
        "panels": panels,
    }


def _facts(run: Run) -> list[str]:
    began = run.headers[0].time
    if run.is_empty:
        return [f"Started {moment(began)}", "no reading yet", *run.remarks]
    last = run.last
    facts = [f"Started {moment(began)}", f"last reading {duration(max(last.time - began, 0))} later"]
    facts.append(position_text(last, run.probe("reading").unit))
    facts += run.remarks
    goes_on = "no end recorded: the run is still going on, or it was cut off"
    return [*facts, goes_on if run.ended is None else f"ended: {run.ended}"]
