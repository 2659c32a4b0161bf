"""Draws the diagrams of the documents as SVG: ``python docs/pictures/diagrams.py`` writes them next to this file.

Pictures of runs are drawn by ``examples.streaming102.pictures``; these are of the parts and of what they say to
each other. A code host and the site show the same files, and neither needs anything else for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["DIAGRAMS", "Canvas"]

FOLDER: Final = Path(__file__).resolve().parent

_INK: Final = "#263238"
_FONT: Final = "font-family='Helvetica, Arial, sans-serif'"
_LINE: Final = 17
_TIP: Final = (
    "<defs><marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
    f"orient='auto-start-reverse'><path d='M0,0 L10,5 L0,10 z' fill='{_INK}'/></marker></defs>"
)
_COLOURS: Final = {
    "user": "#fff3e0",
    "run": "#e0f2f1",
    "store": "#e3f2fd",
    "gc": "#f3e5f5",
    "outside": "#eceff1",
    "room": "#fafafa",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a diagram: a title in bold, and lines under it."""

    x: int
    y: int
    width: int
    height: int
    colour: str
    title: str
    lines: Sequence[str] = ()


@dataclass(slots=True)
class Canvas:
    """A picture that is being drawn."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, *, bold: bool = False, anchor: str = "middle", size: int = 13
    ) -> None:
        """Write a line; ``y`` is its baseline."""
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' {_FONT} font-size='{size}' fill='{_INK}' text-anchor='{anchor}'{weight}>"
            f"{escape(text)}</text>"
        )

    def box(self, box: Box) -> None:
        """Draw a box with its text in the middle."""
        self.parts.append(
            f"<rect x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='6' "
            f"fill='{_COLOURS[box.colour]}' stroke='{_INK}' stroke-width='1.2'/>"
        )
        top = box.y + (box.height - _LINE * len(box.lines)) / 2 + 4
        middle = box.x + box.width / 2
        self.text(middle, top, box.title, bold=True)
        for number, line in enumerate(box.lines, 1):
            self.text(middle, top + number * _LINE, line, size=12)

    def room(self, box: Box) -> None:
        """Draw a frame around boxes, with its title in the corner."""
        self.parts.append(
            f"<rect x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='10' "
            f"fill='{_COLOURS[box.colour]}' stroke='#90a4ae' stroke-dasharray='5 4'/>"
        )
        self.text(box.x + 12, box.y + 20, box.title, bold=True, anchor="start")

    def arrow(self, points: Sequence[tuple[float, float]], label: str = "", *, dashed: bool = False) -> None:
        """Draw an arrow through points, its label above the middle of the first stretch."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{_INK}' stroke-width='1.4'{dash} marker-end='url(#tip)'/>"
        )
        if label:
            (x, y), (x2, y2) = points[0], points[1]
            if x == x2:
                self.text(x + 6, (y + y2) / 2 + 4, label, anchor="start", size=12)
            else:
                self.text((x + x2) / 2, y - 6, label, size=12)

    def svg(self) -> str:
        """Return the picture as SVG."""
        size = f"viewBox='0 0 {self.width} {self.height}' width='{self.width}' height='{self.height}'"
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>",
                f"<title>{escape(self.title)}</title>",
                _TIP,
                f"<rect width='{self.width}' height='{self.height}' fill='white'/>",
                *self.parts,
                "</svg>",
                "",
            ]
        )


# ------------------------------------------------------------------------------ the components


_ROOMS: Final = (
    Box(30, 174, 630, 186, "room", "executor/"),
    Box(30, 396, 860, 112, "room", "statestore/"),
)
_BOXES: Final = (
    (60, 14, 430, 54, "user", "your code", "Pipeline, Computation, windows, triggers, combiners"),
    (520, 14, 370, 54, "user", "millpond/cli/", "millpond status, rows, sql, verify, repair, gc"),
    (60, 100, 430, 44, "run", "executor/windows/", "windowed steps are computations"),
    (50, 206, 180, 60, "run", "local/ and spark/", "the runners: one core,|two ways to feed it"),
    (256, 206, 180, 60, "run", "superstep/", "Superstep.run: plan, run,|commit, apply, deliver"),
    (460, 206, 180, 60, "run", "maintenance/", "compaction and collection|between supersteps"),
    (50, 286, 180, 56, "run", "interval/", "IntervalProcessor:|key by key, your code"),
    (256, 286, 180, 56, "run", "inputs/, pipeline/", "rows become records,|the checked topology"),
    (460, 286, 180, 56, "run", "watermark/, ownership/", "how far time is,|who may write"),
    (
        690,
        206,
        164,
        136,
        "gc",
        "gc/",
        "compaction, vacuum,|orphans, log:|one collector per kind|of garbage, behind|a horizon",
    ),
    (50, 426, 190, 64, "store", "log/", "fenced commits on|Delta's log, snapshots"),
    (260, 426, 190, 64, "store", "rows/, objects/", "row files with seals,|put if absent"),
    (470, 426, 190, 64, "store", "leases/", "sequencers and the|high-water mark"),
    (680, 426, 190, 64, "store", "catalog/, view", "code versions,|one row per key in SQL"),
    (
        50,
        570,
        400,
        90,
        "outside",
        "the Delta table rows/",
        "on a disk or in an object store:|files and log, the only truth",
    ),
    (470, 570, 190, 90, "outside", "ZooKeeper", "embedded, or|an ensemble"),
    (680, 570, 190, 90, "outside", "a SQL database", "SQLite in the folder,|or PostgreSQL"),
)
_ARROWS: Final = (
    (275, 68, 100, ""),
    (275, 144, 174, ""),
    (872, 68, 396, ""),
    (345, 360, 396, "commits, reads"),
    (772, 342, 396, ""),
    (145, 490, 570, "one commit a superstep"),
    (355, 490, 570, "files"),
    (565, 490, 570, "leases, mark"),
    (775, 490, 570, "journals"),
)
"""Downwards: where, from, to."""


def components() -> str:
    """Draw the rooms and their surroundings."""
    canvas = Canvas(920, 690, "The components of Millpond")
    for room in _ROOMS:
        canvas.room(room)
    for x, y, width, height, colour, title, lines in _BOXES:
        canvas.box(Box(x, y, width, height, colour, title, lines.split("|")))
    for x, start, end, label in _ARROWS:
        canvas.arrow([(x, start), (x, end)], label)
    canvas.arrow([(660, 236), (690, 236)])
    return canvas.svg()


# ------------------------------------------------------------------------------ the walks of a record


@dataclass(frozen=True, slots=True)
class Message:
    """What one participant says to another, or does for itself."""

    sender: int
    receiver: int
    text: str


def _sequence(title: str, participants: Sequence[tuple[str, str, str]], messages: Sequence[Message]) -> str:
    spacing, top, row = 218, 76, 44
    canvas = Canvas(spacing * len(participants), top + row * (len(messages) + 1), title)
    places = [spacing * number + spacing // 2 for number in range(len(participants))]
    for place, (colour, name, line) in zip(places, participants, strict=True):
        canvas.parts.append(
            f"<line x1='{place}' y1='62' x2='{place}' y2='{canvas.height - 12}' stroke='#90a4ae' "
            "stroke-dasharray='3 4'/>"
        )
        canvas.box(Box(place - 100, 10, 200, 52, colour, name, [line]))
    for number, message in enumerate(messages, 1):
        y = top + row * number - 12
        start, end = places[message.sender], places[message.receiver]
        label = f"{number}. {message.text}"
        if start == end:
            _note(canvas, start, y, label)
        else:
            canvas.arrow([(start, y), (end, y)])
            _label(canvas, (start + end) / 2, y - 8, label)
    return canvas.svg()


def _label(canvas: Canvas, x: float, y: float, label: str) -> None:
    width = 6.4 * len(label) + 8
    x = min(max(x, width / 2 + 4), canvas.width - width / 2 - 4)
    canvas.parts.append(
        f"<rect x='{x - width / 2:g}' y='{y - 12:g}' width='{width:g}' height='16' fill='white' opacity='0.9'/>"
    )
    canvas.text(x, y, label, size=12)


def _note(canvas: Canvas, x: float, y: float, label: str) -> None:
    width = 6.4 * len(label) + 16
    middle = min(max(x, width / 2 + 4), canvas.width - width / 2 - 4)
    canvas.parts.append(
        f"<rect x='{middle - width / 2:g}' y='{y - 19:g}' width='{width:g}' height='26' rx='4' fill='#fffde7' "
        "stroke='#90a4ae'/>"
    )
    canvas.text(middle, y - 2, label, size=12)


def walk_local() -> str:
    """Draw a record on its way through the local runner."""
    you, worker, writers, store, sinks = range(5)
    return _sequence(
        "The walk of a record through LocalRunner",
        [
            ("user", "your thread", "LocalRun.inject"),
            ("run", "millpond-local", "Superstep, LocalEngine"),
            ("run", "millpond-writer", "two threads"),
            ("store", "the store", "Committer"),
            ("outside", "millpond-sinks", "SinkDelivery"),
        ],
        [
            Message(you, worker, "rows into the intake; a receipt"),
            Message(worker, worker, "take up to 20,000 records; plan the intervals that have work"),
            Message(worker, worker, "key, event time and id of each row; productions of the last superstep"),
            Message(worker, store, "rows that soft state does not have"),
            Message(worker, worker, "IntervalProcessor: timers, records, timers, key by key, in your code"),
            Message(worker, writers, "rows, but the last interval's"),
            Message(writers, store, "one row file an interval"),
            Message(worker, store, "one commit: fences, files, positions, watermarks; put if absent"),
            Message(worker, sinks, "productions of this superstep, while the next one runs"),
            Message(worker, you, "the receipt: durable"),
            Message(worker, worker, "productions go from memory to their consumers, in the next superstep"),
        ],
    )


def walk_spark() -> str:
    """Draw a record on its way through the Spark runner."""
    query, driver, task, store, sinks = range(5)
    return _sequence(
        "The walk of a record through SparkRunner",
        [
            ("outside", "a streaming query", "foreachBatch"),
            ("run", "the driver", "SparkRun, Superstep"),
            ("run", "Python worker of a slot", "spark/task.py"),
            ("store", "the store", "Committer"),
            ("outside", "sinks", "SinkDelivery"),
        ],
        [
            Message(query, driver, "a frame and its batch id"),
            Message(driver, driver, "is the batch new? Plan the intervals that have work"),
            Message(driver, task, "Router in the JVM: key, time, id, interval; repartition by slot"),
            Message(task, store, "productions of the last superstep, missing rows"),
            Message(task, task, "IntervalProcessor: timers, records, timers, key by key, in your code"),
            Message(task, store, "one row file an interval, not yet committed"),
            Message(task, driver, "manifests: file, next timer, hold, counts"),
            Message(driver, store, "one commit: fences, files, positions, watermarks; put if absent"),
            Message(driver, sinks, "productions of this superstep, while the next one runs"),
            Message(driver, query, "the batch is done"),
        ],
    )


DIAGRAMS: Final = {"components.svg": components, "walk_local.svg": walk_local, "walk_spark.svg": walk_spark}
"""The files, and what draws each."""


if __name__ == "__main__":
    for _name, _draw in DIAGRAMS.items():
        (FOLDER / _name).write_text(_draw(), encoding="utf-8")
