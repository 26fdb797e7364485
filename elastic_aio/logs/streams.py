"""The log files of a job on this host, for readers that come at any time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator

from msgspec import Struct, field

from elastic_aio.errors import SpecError
from elastic_aio.ranks import format_ranks

# Attempts of which the files are known, as in a job's result.
_ATTEMPTS_MAX = 100
# Positions of a file of which the times are known.
_KEPT_MAX = 1000


class LineTimes:
    """A bounded number of times by position; the bytes between two have the later time.  Pure."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._times: list[float] = []

    def __repr__(self) -> str:
        return f"<LineTimes: {len(self._ends)} up to byte {self.end}>"

    @property
    def end(self) -> int:
        """The position up to which times are known."""
        return self._ends[-1] if self._ends else 0

    def note(self, end: int, time: float) -> None:
        """Note that the file has been seen up to `end` at a time; a smaller `end` starts anew."""
        if end < self.end:
            self._ends, self._times = [], []
        if end > self.end:
            self._ends.append(end)
            self._times.append(time)
        if len(self._ends) > _KEPT_MAX:
            # Every second one, but not the last.
            del self._ends[:-1:2], self._times[:-1:2]

    def spans(self, start: int, end: int, default: float) -> Iterator[tuple[int, float]]:
        """Yield the parts of a range, by their ends, with their times; `default` if not seen."""
        index = bisect_right(self._ends, start)
        while start < end:
            if index == len(self._ends):
                yield end, default
                return
            start = min(self._ends[index], end)
            yield start, self._times[index]
            index += 1


class LoggedStream(Struct, eq=False):
    """A stream of a worker that is in a file."""

    rank: int
    local_rank: int
    attempt: int
    stream: str
    """`stdout`, `stderr`, or `output` if both are in one file."""
    path: str
    is_shown: bool = False
    """Whether the console shows it."""
    times: LineTimes = field(default_factory=LineTimes)
    make: Callable[[], bool] = lambda: True
    """Makes the file, if no byte has made it yet; returns False if that is impossible now.  Readers
    call it before they open the file."""
    begin: int = 0
    """Position at which readers begin."""
    is_complete: bool = False
    """Whether no process writes any more."""
    child: str = ""
    """The path of its child in a tree."""

    def is_one_of(self, ranks: Collection[int] | None, names: Collection[str]) -> bool:
        """Whether the stream is of these ranks (None: of any), and has one of these names."""
        is_named = self.stream == "output" or self.stream in names
        return is_named and (ranks is None or self.rank in ranks)


class LoggedStreams:
    """The streams of the latest attempts; grows while the job runs."""

    def __init__(self) -> None:
        # By child and by path, in the order of their start.
        self._streams: dict[str, dict[str, LoggedStream]] = {"": {}}
        self.is_closed = False
        """Whether no stream is added any more."""
        self.on_change: dict[object, Callable[[], None]] = {}
        """Called, for each key, when a stream is added, is complete, or the job is over."""

    def __repr__(self) -> str:
        return f"<LoggedStreams: {len([*self])}{', closed' if self.is_closed else ''}>"

    def __iter__(self) -> Iterator[LoggedStream]:
        return iter([stream for known in self._streams.values() for stream in known.values()])

    def get(self, path: str) -> LoggedStream | None:
        found = (known[path] for known in self._streams.values() if path in known)
        return next(found, None)

    def add(self, stream: LoggedStream) -> None:
        """Add a stream of an attempt that begins; forget the streams of very old attempts."""
        oldest, known = stream.attempt - _ATTEMPTS_MAX, self._streams.get(stream.child, {})
        if known and next(iter(known.values())).attempt <= oldest:
            known = {path: other for path, other in known.items() if other.attempt > oldest}
        known[stream.path] = stream
        self._streams[stream.child] = known
        self._notify()

    def complete(self, attempt: int, child: str = "") -> None:
        """Note that the streams of an attempt grow no more.  Idempotent."""
        for stream in self._streams.get(child, {}).values():
            stream.is_complete = stream.is_complete or stream.attempt == attempt
        self._notify()

    def close(self) -> None:
        """Note that the job is over.  Idempotent."""
        self.is_closed = True
        for stream in self:
            stream.is_complete = True
        self._notify()

    def _notify(self) -> None:
        for callback in [*self.on_change.values()]:
            callback()


def check_ranks(ranks: Collection[int], known: Collection[int]) -> None:
    """Check global ranks whose streams are to be read.

    `known` are the ranks of the workers of this node; none if no worker has been started yet.

    Raises:
        SpecError: no worker of this node has one of the ranks.
    """
    if known and (absent := sorted(set(ranks) - set(known))):
        problem = f"must be ranks of workers of this node: {format_ranks(known)}"
        raise SpecError("ranks", absent, problem)
