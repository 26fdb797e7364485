"""LineSplitter: splits the bytes of a log file into whole lines; and the prefixes of lines.

A line ends with a newline.  A carriage return inside a line starts a new *frame* of it, as progress
bars do: the line's text is its last frame that is not empty; other frames are shown while the line
is unfinished, or not at all.  Bytes are not decoded, so no character is ever split and any bytes
are accepted.

The splitter holds at most `HELD_MAX` bytes.  A longer line is returned as a `LongLine`, a range of
the file from which it is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from string import Template

from msgspec import Struct
from msgspec.structs import asdict

from elastic_aio.text import shown_bytes

HELD_MAX = 64 * 1024
DEFAULT_PREFIX = "[${role}${local_rank}]:"


class LogLine(Struct, frozen=True, gc=False):
    """A line that a worker has written.

    A line of more than 64 KiB may come in pieces, of which the last ends the line.
    """

    rank: int
    """Global rank of the worker."""
    stream: str
    """`stdout`, `stderr`, or `output` if both are captured in one file."""
    attempt: int
    """The attempt, from 0."""
    time: float
    """Unix seconds when it was seen, at the latest: a file without a tee or capture is not
    watched before a reader comes, so its lines have the time of its last change by then."""
    raw: bytes
    """The bytes, with the newline if there is one."""
    missed: int | None = 0
    """Bytes of the stream before this line that are not in its file any more; None if their
    number is unknown.  If nothing follows them, `raw` is empty."""
    child: str = ""
    """The path of its child in a tree, such as `serving/3`."""

    @property
    def text(self) -> str:
        """The line as a terminal shows it: without its end, the last state of a progress bar."""
        line = self.raw.decode("utf-8", "replace").rstrip("\r\n")
        return line.rpartition("\r")[2] if "\r" in line else line


class Lines(Struct, frozen=True):
    """Whole lines, each with its newline and without carriage returns."""

    block: bytes


class LongLine(Struct, frozen=True):
    """One long line, from offset `start` to `end` of the file, without its newline."""

    start: int
    end: int
    is_begun: bool = False
    """Whether this is the rest of a line whose beginning has been shown."""


class Frame(Struct, frozen=True):
    text: bytes


Piece = Lines | LongLine | Frame


class LineSplitter:
    """Splits the bytes of one file, in order, into pieces that can be shown.

    After each `feed`, show the pieces in order.  After `finish`, do not feed again.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        """Offset of the next byte to feed."""
        self._held: bytes | None = b""  # the current frame; None: too long, in the file
        self._frame_start = offset  # offset at which the current frame begins
        self._text: bytes | LongLine = b""  # last frame of this line that is not empty

    def __repr__(self) -> str:
        return f"<LineSplitter at {self.offset}, current frame from {self._frame_start}>"

    @property
    def needed(self) -> int:
        """Offset of the first byte that later pieces may refer to."""
        return self._text.start if isinstance(self._text, LongLine) else self._frame_start

    def feed(self, data: bytes, is_behind: bool = False) -> list[Piece]:
        """Take the next bytes of the file; return what can be shown."""
        pieces: list[Piece] = []
        base = self.offset
        cut = data.rfind(b"\n") + 1
        if cut:
            begin = 0
            if self._held is None or self._text:
                # Only the first line has a beginning in earlier data.
                begin = data.index(b"\n") + 1
                self._extend(data[: begin - 1])
                pieces.append(self._end_line())
            if begin < cut:
                block = data[begin:cut] if begin or not self._held else self._held + data[:cut]
                pieces.append(Lines(_last_frames(block)))
            self._begin_line(base + cut)
        self.offset = base + cut
        self._extend(data[cut:])
        if b"\r" in data[cut:] and self._held is not None:
            # The current frame, or the one before while it is empty.
            frame = self._held or (b"" if isinstance(self._text, LongLine) else self._text)
            pieces += [Frame(frame)] if frame else []
        return pieces

    def finish(self) -> list[Piece]:
        """End the file: return a last line without a newline as if it had one."""
        if self._held == b"" and self._text == b"":
            return []
        piece = self._end_line()
        self._begin_line(self.offset)
        return [piece]

    def _extend(self, data: bytes) -> None:
        head, *frames = data.split(b"\r")
        self._grow(head)
        for frame in frames:
            self._keep_text()
            self.offset += 1
            self._held, self._frame_start = b"", self.offset
            self._grow(frame)

    def _grow(self, data: bytes) -> None:
        self.offset += len(data)
        if self._held is not None:
            self._held += data
            if len(self._held) > HELD_MAX:
                self._held = None

    def _keep_text(self) -> None:
        if self._held is None:
            self._text = LongLine(self._frame_start, self.offset)
        elif self._held:
            self._text = self._held

    def _end_line(self) -> Piece:
        self._keep_text()
        text = self._text
        return text if isinstance(text, LongLine) else Lines(text + b"\n")

    def _begin_line(self, offset: int) -> None:
        self.offset = self._frame_start = offset
        self._held, self._text = b"", b""


class RawSplitter:
    """Splits the bytes of one file, in order; a `LineSplitter` for text that stays as it is."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.held = b""
        """The bytes before the offset that were not returned yet."""

    def __repr__(self) -> str:
        return f"<RawSplitter at {self.offset}>"

    @property
    def needed(self) -> int:
        return self.offset - len(self.held)

    def feed(self, data: bytes, is_behind: bool = False) -> list[Piece]:
        """Take the next bytes of the file; return the bytes to be passed on now.

        Bytes that are followed by more, of which `is_behind` tells too, end with a line, so that
        other output comes between two lines.
        """
        self.offset += len(data)
        is_last = len(data) < HELD_MAX and not is_behind
        data, self.held = self.held + data, b""
        if not is_last and (end := data.rfind(b"\n") + 1):
            data, self.held = data[:end], data[end:]
        return [Lines(data)]

    def lines(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the file; return whole lines, and pieces of a long line."""
        self.offset += len(data)
        lines = BytesIO(self.held + data if self.held else data).readlines()
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        while len(rest) > HELD_MAX:
            lines.append(rest[:HELD_MAX])
            rest = rest[HELD_MAX:]
        self.held = rest
        return lines

    def finish(self) -> list[Piece]:
        data, self.held = self.held, b""
        return [Lines(data)] if data else []


def _last_frames(block: bytes) -> bytes:
    """Reduce each line of a block to its last frame that is not empty."""
    if b"\r" not in block:
        return block
    lines = (line.split(b"\r") for line in block.split(b"\n"))
    return b"\n".join(next(filter(None, reversed(frames)), b"") for frames in lines)


def with_prefix(block: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before every line of a block that ends with a newline."""
    if not prefix or not block:
        return block
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


class PrefixFields(Struct, frozen=True):
    role: str
    rank: int
    local_rank: int
    attempt: int
    host: str
    stream: str
    child: str = ""
    """The path of its child in a tree; empty: the job has no children with names."""


def worker_name(child: str, rank: int) -> str:
    """Return the name of a worker before its lines: its rank, in a tree after its child's path."""
    return f"{child}:{rank}" if child else str(rank)


def make_prefix(
    template: str | None, fields: PrefixFields, now: Callable[[], str]
) -> Callable[[], bytes]:
    """Return a function that returns the prefix of lines that are read now.

    The variables are `${role}` (torch: `${role_name}`), `${rank}`, `${local_rank}`, `${attempt}`,
    `${host}`, `${stream}`, `${child}` and `${timestamp}`; unknown ones stay as they are, and `$$`
    is a dollar sign (`string.Template`).  Without a template, it is torchrun's default, for a child
    `worker_name`.  `now` returns the time as text; it is called once per chunk, and only if it is
    used.
    """
    values = asdict(fields) | {"role_name": fields.role}
    if not template and fields.child:
        return fixed_prefix(f"[{worker_name(fields.child, fields.rank)}]:")
    parsed = Template(template or DEFAULT_PREFIX)
    if "timestamp" in parsed.template:
        return lambda: shown_bytes(parsed.safe_substitute(values, timestamp=now()))
    return fixed_prefix(parsed.safe_substitute(values))


def fixed_prefix(text: str) -> Callable[[], bytes]:
    fixed = shown_bytes(text)
    return lambda: fixed
