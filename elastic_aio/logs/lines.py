"""Bytes in, whole lines out: what a follower of a file may show, and when.

A line is whatever stands before a newline.  A carriage return inside a line starts
a new *frame* of it, as progress bars do: only the last frame that says something
counts as the line's text, the others are shown in passing or not at all.  Nothing
is decoded, so no character is ever split and any bytes will do.

The splitter holds at most `HELD_MAX` bytes.  A longer line is not kept in memory:
it is given as a `Span` of the file, to be copied from there.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["HELD_MAX", "Frame", "LineSplitter", "Lines", "Span", "with_prefix"]

HELD_MAX = 64 * 1024


class Lines(Struct, frozen=True):
    """Whole lines, each with its newline and without carriage returns."""

    block: bytes


class Span(Struct, frozen=True):
    """One long line, from offset `start` to `end` of the file, without its newline."""

    start: int
    end: int


class Frame(Struct, frozen=True):
    """What an unfinished line shows at the moment."""

    text: bytes


Piece = Lines | Span | Frame


class LineSplitter:
    """Takes the bytes of one file in order and says what can be shown.

    After each `feed`, show the pieces in order.  After `finish`, feed no more.
    """

    def __init__(self) -> None:
        """Begin at the start of a file."""
        self._offset = 0  # of the next byte to be fed
        self._held: bytes | None = b""  # the current frame; None: too long, in the file
        self._frame_start = 0  # offset at which the current frame begins
        self._said: bytes | Span = b""  # last frame of this line that says something

    def __repr__(self) -> str:
        return f"<LineSplitter at {self._offset}, current frame from {self._frame_start}>"

    @property
    def offset(self) -> int:
        """Offset of the next byte to feed."""
        return self._offset

    def feed(self, data: bytes) -> list[Piece]:
        """Take the next bytes of the file."""
        pieces: list[Piece] = []
        base = self._offset
        cut = data.rfind(b"\n") + 1
        if cut:
            begin = 0
            if self._held is None or self._said:
                # The line that was under way needs care; those after it are plain.
                begin = data.index(b"\n") + 1
                self._extend(data[: begin - 1])
                pieces.append(self._end_line())
            if begin < cut:
                block = data[begin:cut] if begin or not self._held else self._held + data[:cut]
                pieces.append(Lines(_last_frames(block)))
            self._begin_line(base + cut)
        self._offset = base + cut
        self._extend(data[cut:])
        if b"\r" in data[cut:] and (frame := self._current_frame()):
            pieces.append(Frame(frame))
        return pieces

    def finish(self) -> list[Piece]:
        """The file is over: give a last line that has no newline as if it had one."""
        if self._held == b"" and self._said == b"":
            return []
        piece = self._end_line()
        self._begin_line(self._offset)
        return [piece]

    def _extend(self, data: bytes) -> None:
        """Add bytes without a newline to the current line."""
        head, *frames = data.split(b"\r")
        self._grow(head)
        for frame in frames:
            self._keep_said()
            self._offset += 1
            self._held, self._frame_start = b"", self._offset
            self._grow(frame)

    def _grow(self, data: bytes) -> None:
        self._offset += len(data)
        if self._held is not None:
            self._held += data
            if len(self._held) > HELD_MAX:
                self._held = None

    def _keep_said(self) -> None:
        if self._held is None:
            self._said = Span(self._frame_start, self._offset)
        elif self._held:
            self._said = self._held

    def _end_line(self) -> Piece:
        self._keep_said()
        said = self._said
        return said if isinstance(said, Span) else Lines(said + b"\n")

    def _begin_line(self, offset: int) -> None:
        self._offset = self._frame_start = offset
        self._held, self._said = b"", b""

    def _current_frame(self) -> bytes:
        if self._held:
            return self._held
        return b"" if isinstance(self._said, Span) or self._held is None else self._said


def _last_frames(block: bytes) -> bytes:
    """Reduce each line of a block to its last frame that says something."""
    if b"\r" not in block:
        return block
    return b"\n".join(
        next((frame for frame in reversed(line.split(b"\r")) if frame), b"")
        if b"\r" in line
        else line
        for line in block.split(b"\n")
    )


def with_prefix(block: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before every line of a block that ends with a newline."""
    if not prefix or not block:
        return block
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
