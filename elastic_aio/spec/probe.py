"""Probes of a worker: when it is ready, and whether it is still alive.

A probe is a value: what is asked, how often, and how many answers in a row count.  `agent.probes`
asks.  `LaunchSpec.ready` takes each of them; `LaunchSpec.alive` those that are asked again and
again (`PolledProbe`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.ranks import with_local_rank
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field, spec_fields
from elastic_aio.text import os_bytes

_URL: Final = re.compile(r"(https?)://([^/?#\s]+)([/?][!-~]*)?")
_PORTS: Final = {"http": 80, "https": 443}
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of a header, as RFC 9110 defines a token."""
_ACCEPTED: Final = (
    "must be a URL, tcp://HOST:PORT, exec:COMMAND, log:REGEX, notify, a probe, or a table with one"
    " of http, tcp, exec, log"
)


class Probe(SpecValue, prefix="probe."):
    """What says that a worker is ready, or alive: the base of all probes."""

    is_message: ClassVar[bool] = False
    """Whether a message of the worker is the answer."""

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the streams of a worker that are read."""
        return ()

    def check_with(self, name: str, nproc: int) -> None:
        """Raise `SpecError` of the field `name` if it fits no worker of so many."""


class Notify(Probe):
    """The worker says itself that it is ready: by `READY=1`, or `elastic_aio.worker.ready`."""

    is_message: ClassVar[bool] = True


class LogMatch(Probe):
    """The worker is ready when a line of its output matches, as a terminal shows it.

    Colours and other escape sequences are left out, and each state of a progress bar is a line.  So
    is an unfinished line, as a prompt is, that has not grown for 0.2 s.
    The streams have to be in files: redirected, tee'd, or captured as standard error is by default.
    """

    pattern: str = field(check=lambda name, value: _pattern(name, value), kw_only=False)
    """A regular expression, looked for in the first and the last 4096 bytes of each line."""
    stream: Literal["any", "stdout", "stderr"] = field(
        default="any", check=checks.OneOf(("any", "stdout", "stderr"))
    )
    """The stream that is read: "stdout", "stderr", or "any" of the two."""

    @property
    def streams(self) -> tuple[str, ...]:
        return ("stdout", "stderr") if self.stream == "any" else (self.stream,)


class PolledProbe(Probe):
    """A probe that is asked again and again; times are in seconds."""

    period: float = field(default=1.0, check=checks.Seconds(at_least=0.01))
    """From the start of a question to the start of the next one; an answer that takes longer is
    waited for."""
    timeout: float = field(default=1.0, check=checks.Seconds(above=0))
    """The longest time until the answer; a later one is a failure."""
    threshold: int | None = field(default=None, check=checks.Whole(at_least=1))
    """How many answers in a row count: successes until a worker is ready (None: 1), failures until
    it is not alive (None: 3)."""
    initial_delay: float = field(default=0.0, check=checks.Seconds(at_least=0))
    """From the start of the worker (of `alive`: from the time at which it is ready) to the first
    question."""

    def check_with(self, name: str, nproc: int) -> None:
        for local_rank in {0, nproc - 1}:
            try:
                self._check_for(local_rank)
            except SpecError as error:
                raise SpecError(name, error.value, error.problem) from None

    def _check(self) -> None:
        self._check_for(0)

    def _check_for(self, local_rank: int) -> None:
        """Raise `SpecError` if a worker cannot be asked."""


class Tcp(PolledProbe):
    """The worker accepts a connection at `address`, `HOST:PORT`."""

    address: str = field(check=checks.checked_text, kw_only=False)
    """`HOST:PORT` or `[IPV6]:PORT`; `${local_rank}` is replaced."""

    def _check_for(self, local_rank: int) -> None:
        self.host_port(local_rank)

    def host_port(self, local_rank: int) -> tuple[str, int]:
        """Return host and port of a worker."""
        return checks.parse_host_port("probe.address", with_local_rank(self.address, local_rank))


class HttpTarget(Struct, frozen=True):
    """Where one worker is asked over HTTP."""

    is_tls: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        default = _PORTS["https" if self.is_tls else "http"]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == default else checks.format_host_port(self.host, self.port)


def _expects(name: str, value: object) -> tuple[int, int]:
    if isinstance(value, range) and value and value.step == 1:
        value = value.start, value.stop - 1
    if isinstance(value, int) and not isinstance(value, bool):
        value = value, value
    low, high = checks.checked_pair(name, value)
    checks.checked_integer(name, low, at_least=100)
    if not low <= checks.checked_integer(name, high, at_least=100) <= 599:
        raise SpecError(name, value, "must be a pair of status codes from 100 to 599")
    return low, high


def _headers(name: str, value: object) -> Mapping[str, str]:
    headers = checks.checked_texts(name, value)
    for header, text in headers.items():
        if not _TOKEN.fullmatch(header):
            raise SpecError(name, header, "must hold names of headers")
        if not re.fullmatch(r"[\t -~]*", text):
            raise SpecError(name, text, "must hold values of headers, in ASCII")
    return headers


class Http(PolledProbe):
    """The worker answers a GET of `url` with a status code that is expected.

    Redirects are not followed, and a certificate is not verified: the worker is on this host.
    """

    url: str = field(check=checks.checked_text, kw_only=False)
    """An `http://` or `https://` URL; `${local_rank}` is replaced."""
    expects: Converted[tuple[int, int], tuple[int, int] | range | int] = field(
        default=(200, 399), check=_expects
    )
    """The first and the last status code of a success."""
    headers: Mapping[str, str] = field(default=MappingProxyType({}), check=_headers)
    """Further headers of the request."""

    def _check_for(self, local_rank: int) -> None:
        http_target(self, local_rank)


def http_target(probe: Http, local_rank: int) -> HttpTarget:
    """Return where a worker is asked, or raise SpecError."""
    url = with_local_rank(probe.url, local_rank)
    match = _URL.fullmatch(url)
    if match is None:
        raise SpecError("probe.url", url, "must be http://HOST:PORT/PATH or https://...")
    scheme, where, path = match.groups(default="/")
    host, port = checks.parse_host_port("probe.url", where, default_port=_PORTS[scheme])
    return HttpTarget(scheme == "https", host, port, path if path.startswith("/") else f"/{path}")


def _argv(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = ("/bin/sh", "-c", value)
    argv = tuple(checks.checked_text(name, item) for item in checks.checked_items(name, value))
    if not argv or not argv[0] or not argv[-1]:
        raise SpecError(name, value, "must be a command")
    return argv


class Exec(PolledProbe):
    """A command exits with 0; it is killed, with its process group, at the timeout."""

    argv: Converted[tuple[str, ...], Iterable[str]] = field(check=_argv, kw_only=False)
    """Program and arguments, in which `${local_rank}` is replaced; a text is a command of the
    shell.  It runs as the worker does: in its environment and directory, as its user."""

    def command(self, local_rank: int) -> tuple[str, ...]:
        """Return program and arguments for a worker."""
        return tuple(with_local_rank(item, local_rank) for item in self.argv)


# ------------------------------------------------------------------- the forms of a probe


def _pattern(name: str, value: object) -> str:
    text = checks.checked_text(name, value)
    try:
        compile_pattern(text)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise SpecError(name, value, f"must be a regular expression: {error}") from None
    return text


def compile_pattern(pattern: str) -> re.Pattern[bytes]:
    """Return a pattern for the bytes of a line, whose frames (of a progress bar) are lines."""
    return re.compile(os_bytes(pattern), re.MULTILINE)


KINDS: Final[Mapping[str, Any]] = {"http": Http, "tcp": Tcp, "exec": Exec, "log": LogMatch}
"""Probes by their key in a table."""


def checked_probe(name: str, value: object) -> Probe:
    """Return a probe, given as a value, as a text of the command line, or as a table.

    Raises:
        SpecError: it has none of these forms; the error names the field `name`.
    """
    if isinstance(value, Probe) and type(value) not in (Probe, PolledProbe):
        return value
    if isinstance(value, str):
        if value == "notify":
            return Notify()
        kind, colon, rest = value.partition(":")
        if kind in ("http", "https"):
            kind, rest = "http", value
        if colon and kind in KINDS:
            try:
                probe: Probe = KINDS[kind](rest.removeprefix("//") if kind == "tcp" else rest)
            except SpecError as error:
                raise SpecError(name, value, error.problem) from None
            return probe
    if isinstance(value, Mapping):
        return _from_table(name, value)
    raise SpecError(name, value, _ACCEPTED)


def checked_alive(name: str, value: object) -> PolledProbe:
    """Return a probe that can be asked again and again, or raise SpecError as `checked_probe`."""
    probe = checked_probe(name, value)
    if isinstance(probe, Notify):
        raise SpecError(name, value, "must not be notify: see liveness.heartbeat_timeout")
    if not isinstance(probe, PolledProbe):
        raise SpecError(name, value, "must be a probe that can be asked again: http, tcp or exec")
    return probe


def _from_table(name: str, table: Mapping[Any, Any]) -> Probe:
    kinds = [key for key in table if key in KINDS]
    if len(kinds) != 1:
        raise SpecError(name, table, _ACCEPTED)
    settings = {key: value for key, value in table.items() if key != kinds[0]}
    make = KINDS[kinds[0]]
    # The positional field stands under the name of the probe.
    known = [key for key, one in spec_fields(make).items() if not one.is_positional]
    checks.check_keys(name, settings, [kinds[0], *known])
    try:
        return make(table[kinds[0]], **settings)  # type: ignore[no-any-return]  # one of `KINDS`
    except SpecError as error:
        field_name = error.field.removeprefix("probe.")
        raise SpecError(f"{name}.{field_name}", error.value, error.problem) from None
