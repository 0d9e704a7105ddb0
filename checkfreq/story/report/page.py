"""The report as one HTML page: no script, nothing from a network, light and dark, wide and narrow.

All text from events is escaped, and a policy in the page forbids everything but its own styles.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from checkfreq.errors import printable
from checkfreq.story.facts import (
    ABOVE,
    amount,
    done_again,
    first_step,
    number,
    percent,
    plural,
    rate,
    span,
    troubles,
)
from checkfreq.story.failing import failure_rate
from checkfreq.story.figures import Figures, State
from checkfreq.story.model import Loss, Run, Story
from checkfreq.story.report.charts import CHARTS, ROLES, Chart, Style, save_settings
from checkfreq.story.report.series import Series
from checkfreq.types import moment

_WIDE, _NARROW = 9.0, 3.7
#: Beside what is red: many people do not see that, and printers neither.
_WARNING = "\u26a0 "
_MOST_RUNS = 200
_MOST_TROUBLES = 50
_HEAD = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_STYLE = re.compile(r"\s*<style type=\"text/css\">.*?</style>", re.DOTALL)
_SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>')
_FONT = re.compile(r"font: ([0-9.]+px) [^;\"]*")
_IDS = re.compile(r'(\bid="|url\(#|href="#)')

_CSS = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f5f6f8; --line: #d8dce1;
  --soft: #59626d; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #16191d; --card: #20242a; --line: #3a4048;
  --soft: #a2abb6; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 66rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; } h2 { font-size: 1.12rem; margin: 2rem 0 .1rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border-radius: .5rem; padding: .55rem .75rem; }
.cards b { display: block; font-size: 1.15rem; }
.cards span { color: var(--soft); font-size: .85rem; }
.bad b { color: var(--red); }
figure { margin: .4rem 0 0; } svg { width: 100%; height: auto; display: block; }
svg * { stroke-linejoin: round; stroke-linecap: butt; } svg text { font-family: inherit; }
.narrow { display: none; }
.scroll { overflow-x: auto; --from: to right, var(--page) 40%, transparent;
  --past: to left, var(--page) 40%, transparent; background: linear-gradient(var(--from)) left,
  linear-gradient(var(--past)) right, linear-gradient(to right, var(--line), transparent) left,
  linear-gradient(to left, var(--line), transparent) right; background-repeat: no-repeat;
  background-size: 2.5rem 100%, 2.5rem 100%, .6rem 100%, .6rem 100%;
  background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; font-size: .82rem; width: 100%; }
th, td { text-align: left; padding: .3rem .5rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; } td.text { white-space: normal; min-width: 16rem; }
th { color: var(--soft); font-weight: 600; }
@media (max-width: 600px) { .wide { display: none; } .narrow { display: block; }
  body { padding: .8rem; } }
@media print { .narrow { display: none; } }
"""

_STATES = {
    State.TRAINING: "training",
    State.SILENT: "silent for longer than usual",
    State.KILLED: "killed, or lost",
    State.CLOSED: "ended",
    State.FAILED: "ended by an error",
    State.STOPPED: "stopped when it was told to",
    State.FINISHED: "finished",
    State.NONE: "no run yet",
}


def page(story: Story, now: Figures, *, directory: Path) -> str:
    """The report of a directory, an absolute path, of which only the name is shown."""
    name = directory.name or str(directory)
    title = f"checkfreq report: {printable(name)}"
    series = Series(story)
    parts = [
        f"<h1>{escape(printable(name))}</h1>",
        f'<p class="soft">{escape(_when(story, now))}</p>',
        f"<p>{escape(_sentence(story, now))}</p>",
        _cards(now, story),
        *(_section(number_, chart, series) for number_, chart in enumerate(CHARTS)),
        _runs(story, now),
        _troubles(story),
        _all_facts(now),
    ]
    body = "\n".join(part for part in parts if part)
    # It is meant to be sent: errors name the directory, and whose it is.
    for private, public in ((f"{directory}", name), (f"{Path.home()}/", "~/")):
        body = body.replace(escape(private), escape(public))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_style_sheet()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def png(figure: Figure) -> bytes:
    """A figure as a PNG file, on white."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(save_settings()):
        figure.savefig(buffer, format="png", dpi=150, facecolor="#ffffff")
    return buffer.getvalue()


def svg(figure: Figure, *, prefix: str, label: str) -> str:
    """A figure as an element of a page; its colours are variables of the page's style sheet."""
    buffer = io.StringIO()
    with matplotlib.rc_context(save_settings()):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = _HEAD.sub("", buffer.getvalue(), count=1)
    text = _STYLE.sub("", _METADATA.sub("", text, count=1), count=1)
    head = f'<svg viewBox="\\1" role="img" aria-label="{escape(label)}">'
    text = _FONT.sub(r"font-size: \1", _SIZE.sub(head, text, count=1))
    text = _IDS.sub(rf"\1{prefix}-", text)
    for role, (marker, _, _) in ROLES.items():
        text = text.replace(marker, f"var(--{role})")
    return text.strip()


def _style_sheet() -> str:
    light = " ".join(f"--{role}: {light};" for role, (_, light, _) in ROLES.items())
    dark = " ".join(f"--{role}: {dark};" for role, (_, _, dark) in ROLES.items())
    return _CSS.replace("LIGHT", light).replace("DARK", dark)


def _section(index: int, chart: Chart, series: Series) -> str:
    drawn = []
    for kind, width in (("wide", _WIDE), ("narrow", _NARROW)):
        figure = chart.figure(series, Style(width, for_page=True))
        if figure is None:
            return ""
        content = svg(figure, prefix=f"{kind[0]}{index}", label=chart.title)
        drawn.append(f'<div class="{kind}">{content}</div>')
    return (
        f'<h2>{escape(chart.title)}</h2>\n<figure id="{chart.name}">\n'
        f"<figcaption>{escape(chart.caption)}</figcaption>\n{''.join(drawn)}\n</figure>"
    )


def _when(story: Story, now: Figures) -> str:
    first = f", since {moment(story.runs[0].began_s)}" if story.runs else ""
    zone = time.strftime("%Z", time.localtime(now.at_unix_s))
    return f"{plural(story.num_events, 'event')}{first}; report of {moment(now.at_unix_s)} {zone}"


def _sentence(story: Story, now: Figures) -> str:
    """The story in a few sentences."""
    run = story.run
    if run is None:
        return "There is no run yet."
    text = f"{plural(len(story.runs), 'run')}; the latest is {_STATES[now.state]}, at iteration "
    text += f"{number(now.step)}{' (estimated)' if now.is_estimated else ''}. "
    if now.last_durable_step is not None:
        text += f"The newest durable checkpoint is of iteration {number(now.last_durable_step)}. "
    if losses := story.losses:
        lost = sum(losses, Loss(0, 0, 0))
        text += f"{plural(len(losses), 'restart')}: {done_again(lost)} done again. "
    if _is_above(now):
        text += (
            f"Checkpoints have added {percent(now.overhead)}, above the {percent(now.max_overhead)}"
            " that the bound allows: it holds for periodic ones. The first, the last and requested "
            "ones come on top, which weighs most in a short run. "
        )
    failures = failure_rate(story)
    if failures.failures:
        text += f"Runs have failed {failures.explain()}. "
    if now.expected_loss_s is not None:
        text += f"A failure costs {span(now.expected_loss_s)} of work on average."
    return text


def _is_above(now: Figures) -> bool:
    return (now.used_of_bound or 0.0) > ABOVE


def _cards(now: Figures, story: Story) -> str:
    bound = "" if now.max_overhead is None else f", of {percent(now.max_overhead)} allowed"
    lost = sum(story.losses, Loss(0, 0, 0))
    again = f"{'' if lost.is_exact else 'about '}{span(lost.work_s)}"
    if lost.most_steps and not lost.work_s:  # it is not known how long an iteration takes
        again = done_again(lost)
    cards = [
        ("durable checkpoints", number(now.num_committed), now.num_committed == 0),
        ("newest durable iteration", number(now.last_durable_step), False),
        (f"overhead{bound}", percent(now.overhead), _is_above(now)),
        ("expected loss per failure", span(now.expected_loss_s), False),
        (_interval_label(now), _every(now), False),
        ("held training by the last one", span(now.stall_s), False),
        ("size of the last one", amount(now.checkpoint_bytes), False),
        ("speed of the last persist", rate(now.bytes_per_s), False),
        ("written to storage", amount(now.total_written_bytes), False),
        ("restarts", number(now.num_restored), False),
        ("work done again", again, False),
        ("failed checkpoints", number(now.num_failed), now.num_failed > 0),
    ]
    items = (
        f"<li{' class=bad' if is_bad else ''}><b>{_WARNING * is_bad}{escape(value)}</b>"
        f"<span>{escape(label)}</span></li>"
        for label, value, is_bad in cards
    )
    return f'<ul class="cards">{"".join(items)}</ul>'


def _every(now: Figures) -> str:
    return "-" if now.interval_steps is None else f"every {number(now.interval_steps)}"


def _interval_label(now: Figures) -> str:
    why = f"; reason: {printable(now.reason)}" if now.reason else ""
    return f"iterations, {span(now.interval_s)}{why}"


def _runs(story: Story, now: Figures) -> str:
    head = ("Run", "From", "Lasted", "Iterations", "Restored", "Done again", "Durable",
            "Failed", "Overhead", "Held", "Written", "End")  # fmt: skip
    rows = [_run_cells(story, run, now) for run in story.runs[-_MOST_RUNS:]]
    left = len(story.runs) - len(rows)
    note = f'<p class="soft">{plural(left, "earlier run")} not shown.</p>' if left else ""
    return f"<h2>Runs</h2>\n{note}{_table(head, rows)}" if rows else ""


def _run_cells(story: Story, run: Run, now: Figures) -> list[str]:
    loss, restore = story.loss(run), run.restore
    lost = "-"
    if loss is not None:
        least = "" if loss.is_exact else f"{number(loss.least_steps)} to "
        lost = f"{least}{number(loss.most_steps)} ({'about ' if least else ''}{span(loss.work_s)})"
    return [
        str(run.number),
        moment(run.began_s, "%Y-%m-%d %H:%M"),
        span(max(0.0, run.last_s - run.began_s)),
        f"{number(first_step(run))} to {number(run.reached_step)}",
        "-" if restore is None else restore.source or "directory",
        lost,
        number(len(run.saves)),
        number(run.counts["failed"]),
        percent(run.overhead),
        span(run.stall_s) if run.saves else "-",
        amount(run.written_bytes),
        run.how or (now.state.value if run is story.run else "killed"),
    ]


def _troubles(story: Story) -> str:
    found = troubles(story)
    if not found:
        return ""
    rows = [
        [moment(note.at_s), note.kind, number(note.step) if note.step >= 0 else "-", note.text]
        for note in found[-_MOST_TROUBLES:]
    ]
    left = len(found) - len(rows)
    note = f'<p class="soft">{plural(left, "earlier one")} not shown.</p>' if left else ""
    return f"<h2>What went wrong</h2>\n{note}{_table(('When', 'What', 'Iteration', ''), rows)}"


def _all_facts(now: Figures) -> str:
    rows = [[name, _plain(name, value)] for name, value in now.to_json().items()]
    table = _table(("Figure", "Value"), rows)
    return f"<h2>All figures</h2>\n<details><summary>As data</summary>{table}</details>"


def _plain(name: str, value: object) -> str:
    if name.endswith("unix_s") and isinstance(value, float):
        return moment(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(
        f"<tr>{''.join(_cell(title, cell) for title, cell in zip(head, row, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(title: str, text: str) -> str:
    kind = "" if title else ' class="text"'
    return f"<td{kind}>{escape(printable(text, keep=chr(10)))}</td>"
