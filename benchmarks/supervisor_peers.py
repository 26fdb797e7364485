"""Supervisors of processes, each with a configuration of the same programs.

A peer renders a `Setup` as its own configuration, and has commands for what a user asks of it.
What it has no setting for raises `Lacks`: such a cell of the table says so, and was not run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import OURS, Installer, Lacks, Peer, output_of, refuse
from elastic_aio import __version__
from tests.support.sockets import free_port

__all__ = ["CHILD", "SUPERVISOR_PEERS", "Program", "Setup", "Supervisor"]

CHILD = Path(__file__).parent / "workers/child.py"
_OTP = Path(__file__).parent / "workers/otp.erl"
_STOP_S = 1
"""Seconds between the SIGTERM and the SIGKILL of a child."""


@dataclass(frozen=True)
class Program:
    """A program to supervise; `words` are the behaviours of `workers/child.py`.

    `serves` is a version that it answers at the listening socket of the setup.
    """

    name: str
    words: tuple[str, ...] = ()
    number: int = 1
    restart: bool = True
    after: str = ""
    ready: str = ""  # "line": it prints "ready"; "http": it answers at `port`
    alive: bool = False
    port: int = 0
    serves: str = ""


@dataclass(frozen=True)
class Setup:
    """What a peer has to run."""

    programs: tuple[Program, ...]
    ends_with: str = ""
    limit: int | None = None  # restarts, before a child is given up
    nested: bool = False  # the programs are a group of their own below the outermost one
    port: int = 0  # of the listening socket
    logs: bool = False
    console: bool = False  # the output of all is that of the supervisor


class Supervisor(Peer):
    """A supervisor of programs."""

    reloads_by: ClassVar[int] = 0
    """Signal by which it reads its configuration anew; 0: a command does so."""

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write the configuration; return the command that runs it in the foreground."""
        raise NotImplementedError

    def control(self, directory: Path, verb: str, *words: str) -> list[str]:
        """Return the command of "status NAME", "reload" or "scale NAME OLD NEW"."""
        raise Lacks

    def say(self, directory: Path, verb: str, *words: str) -> str:
        """Return what is written to the standard input of the supervisor for a request."""
        raise Lacks

    def broken(self, directory: Path) -> list[str]:
        """Return the command that runs a configuration with an error."""
        raise Lacks


def _child(program: Program, directory: Path, fd: str = "") -> list[str]:
    """Return the command of a program."""
    words = [*program.words, *([f"serve={fd},{program.serves}"] if program.serves else [])]
    return [sys.executable, "-S", str(CHILD), str(directory / "notes"), program.name, *words]


class ElasticAio(Supervisor):
    """`aio-elastic up --reload-on-hup`."""

    reloads_by = int(signal.SIGHUP)

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write `jobs.toml`."""
        (directory / "jobs.toml").write_text("\n".join(self._lines(setup, directory)) + "\n")
        return self._command("up", str(directory / "jobs.toml"), "--reload-on-hup")

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "elastic_aio", *words]

    def _lines(self, setup: Setup, directory: Path) -> Iterator[str]:
        yield 'run_id = "table"'
        if setup.ends_with:
            yield f'ends_with = "{setup.ends_with}"'
        if setup.console or any(program.ready == "line" for program in setup.programs):
            yield 'logs = { tee = "3" }'  # lines are read where they are in files
        elif setup.logs:
            yield f'logs = {{ log_dir = "{directory}/logs", redirects = "3" }}'
        above = "group.children." if setup.nested else ""
        if setup.nested:
            yield "[children.group]\nmax_restarts = 1\nwindow = { count = 1, seconds = 10 }"
        for program in setup.programs:
            yield f"[children.{above}{program.name}]"
            yield f"command = {json.dumps(_child(program, directory, '3'))}"
            yield f"stop = {_STOP_S}"
            yield from self._settings(setup, program)

    def _settings(self, setup: Setup, program: Program) -> Iterator[str]:
        when = "always" if program.restart and setup.limit is None else "on-failure"
        scope = "worker" if program.number > 1 else "group"
        yield f'restart = {{ when = "{when}", scope = "{scope}" }}'
        if program.restart:
            yield f"max_restarts = {3 if setup.limit is None else setup.limit}"
        yield f"nproc_per_node = {program.number}"
        if program.after:
            yield f'after = ["{program.after}"]'
        http = f'{{ http = "http://127.0.0.1:{program.port}/", period = 0.1, timeout = 0.5 }}'
        line = '{ log = "ready" }'
        if program.ready:
            yield f"ready = {http if program.ready == 'http' else line}"
        if program.alive:
            yield f"alive = {http}"
        if program.serves:
            yield f'sockets = ["tcp://127.0.0.1:{setup.port}"]'

    def control(self, directory: Path, verb: str, *words: str) -> list[str]:
        """Return `aio-elastic status` or `scale` of the job."""
        if verb == "scale":
            words = (words[0], words[2])
        return self._command(verb, "table", *words)

    def broken(self, directory: Path) -> list[str]:
        """Run a child without a command."""
        (directory / "jobs.toml").write_text("[children.web]\ncommand = []\n")
        return self._command("up", str(directory / "jobs.toml"))


class Supervisord(Supervisor):
    """supervisord, in the foreground, with its control socket."""

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write `supervisord.conf`."""
        refuse(setup.ends_with, setup.nested)
        text = [
            f"[supervisord]\nnodaemon=true\nlogfile={directory}/main.log\n"
            f"pidfile={directory}/pid\nchildlogdir={directory}",
            f"[unix_http_server]\nfile={directory}/control",
            f"[supervisorctl]\nserverurl=unix://{directory}/control",
            "[rpcinterface:supervisor]\nsupervisor.rpcinterface_factory ="
            " supervisor.rpcinterface:make_main_rpcinterface",
            *(self._section(setup, program, directory) for program in setup.programs),
        ]
        (directory / "supervisord.conf").write_text("\n".join(text) + "\n")
        return [str(self.tools / "supervisord"), "-c", str(directory / "supervisord.conf")]

    def _section(self, setup: Setup, program: Program, directory: Path) -> str:
        refuse(program.ready, program.alive)
        # Only the sections of FastCGI have a socket; it is standard input of any program.
        kind = "fcgi-program" if program.serves else "program"
        log = f"{directory}/%(program_name)s.log" if setup.logs else "/dev/fd/1"
        lines = [
            f"[{kind}:{program.name}]",
            f"command={' '.join(_child(program, directory, '0'))}",
            f"autorestart={'true' if program.restart else 'false'}",
            f"stopwaitsecs={_STOP_S}\nstopasgroup=true\nkillasgroup=true",
            f"priority={2 if program.after else 1}",
            f"stdout_logfile={log}\nstdout_logfile_maxbytes=0",
        ]
        if setup.limit is not None:
            lines.append(f"startretries={setup.limit}")
        if program.number > 1:
            lines.append(f"numprocs={program.number}\nprocess_name=%(process_num)s")
        if program.serves:
            lines.append(f"socket=tcp://127.0.0.1:{setup.port}")
        return "\n".join(lines)

    def control(self, directory: Path, verb: str, *words: str) -> list[str]:
        """Return `supervisorctl status` or `update`, which also makes a new number of processes."""
        command = [str(self.tools / "supervisorctl"), "-c", str(directory / "supervisord.conf")]
        return [*command, *({"status": ["status", *words]}.get(verb, ["update"]))]

    def broken(self, directory: Path) -> list[str]:
        """Run a program without a command."""
        command = self.write(Setup((Program("web"),)), directory)
        path = directory / "supervisord.conf"
        path.write_text(path.read_text().replace("command=", "comand="))
        return command


class Circus(Supervisor):
    """circusd, with its control socket."""

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write `circus.ini`."""
        refuse(setup.ends_with, setup.nested)
        ports = directory / "ports"
        if not ports.exists():  # a second configuration has the same ones
            ports.write_text(f"{free_port()} {free_port()}")
        control, events = ports.read_text().split()
        text = [
            f"[circus]\nendpoint=tcp://127.0.0.1:{control}\npubsub_endpoint=tcp://127.0.0.1:{events}",
            *(self._section(setup, program, directory) for program in setup.programs),
        ]
        if setup.port:
            text.append(f"[socket:web]\nhost=127.0.0.1\nport={setup.port}")
        (directory / "circus.ini").write_text("\n".join(text) + "\n")
        return [str(self.tools / "circusd"), str(directory / "circus.ini")]

    def _section(self, setup: Setup, program: Program, directory: Path) -> str:
        refuse(program.ready, program.alive)
        words = _child(program, directory, "$(circus.sockets.web)")
        lines = [
            f"[watcher:{program.name}]\ncmd={' '.join(words)}",
            f"numprocesses={program.number}\ncopy_env=True\ngraceful_timeout={_STOP_S}",
            f"respawn={program.restart}\npriority={1 if program.after else 2}",
            "use_sockets=True\nstop_children=True",
        ]
        if setup.limit is not None:
            lines.append(f"max_retry={setup.limit}")
        if setup.logs:
            log = f"{directory}/{program.name}.log"
            lines.append(f"stdout_stream.class=FileStream\nstdout_stream.filename={log}")
        return "\n".join(lines)

    def control(self, directory: Path, verb: str, *words: str) -> list[str]:
        """Return `circusctl list`, `reloadconfig`, or `incr`."""
        port = (directory / "ports").read_text().split()[0]
        command = [str(self.tools / "circusctl"), "--endpoint", f"tcp://127.0.0.1:{port}"]
        if verb == "scale":
            name, old, new = words
            more = int(new) - int(old)
            return [*command, "incr" if more > 0 else "decr", name, str(abs(more))]
        return [*command, *({"status": ["list", *words]}.get(verb, ["reloadconfig"]))]

    def broken(self, directory: Path) -> list[str]:
        """Run a watcher without a command."""
        command = self.write(Setup((Program("web"),)), directory)
        path = directory / "circus.ini"
        path.write_text(path.read_text().replace("cmd=", "comand="))
        return command


class Honcho(Supervisor):
    """honcho, with a Procfile."""

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write `Procfile`."""
        refuse(setup.nested, setup.port, setup.logs, setup.limit is not None)
        lines = []
        for program in setup.programs:
            refuse(program.after, program.ready, program.alive)
            lines.append(f"{program.name}: exec {' '.join(_child(program, directory))}")
        (directory / "Procfile").write_text("\n".join(lines) + "\n")
        numbers = ",".join(f"{each.name}={each.number}" for each in setup.programs)
        command = [str(self.tools / "honcho"), "-f", str(directory / "Procfile")]
        return [*command, "start", "--no-colour", "-c", numbers]

    def broken(self, directory: Path) -> list[str]:
        """Run a line that has no colon."""
        (directory / "Procfile").write_text("web true\n")
        return [str(self.tools / "honcho"), "-f", str(directory / "Procfile"), "start"]


class Otp(Supervisor):
    """A supervisor in Erlang: `workers/otp.erl`."""

    def write(self, setup: Setup, directory: Path) -> list[str]:
        """Write the children as Erlang terms."""
        refuse(setup.port, setup.logs, setup.console)
        children = [
            self._term(setup, program, number, directory)
            for program in setup.programs
            for number in range(program.number)
        ]
        intensity = 100 if setup.limit is None else setup.limit
        shut = ", auto_shutdown => any_significant" if setup.ends_with else ""
        flags = f"#{{intensity => {intensity}, period => 10{shut}}}"
        if setup.nested:
            children = [f"{{nested, {flags}, [{', '.join(children)}]}}"]
            flags = "#{intensity => 1, period => 10}"
        terms = [f"{{sup, {flags}}}", *children]
        (directory / "children").write_text("".join(f"{term}.\n" for term in terms))
        return self._command(directory)

    def _command(self, directory: Path) -> list[str]:
        main = f'otp:main(["{directory}/children"])'
        return [str(self.tools / "erl"), "-noshell", "-pa", str(self.tools), "-eval", main]

    def _term(self, setup: Setup, program: Program, number: int, directory: Path) -> str:
        refuse(program.alive, program.ready == "http")
        name = f"{program.name}{number or ''}"
        ends = program.name == setup.ends_with
        restart = "temporary" if ends or not program.restart else "permanent"
        waits = str(program.ready == "line").lower()
        words = json.dumps(_child(program, directory))
        fields = [json.dumps(name), restart, str(ends).lower(), waits, f"{_STOP_S}000", words]
        return f"{{child, {', '.join(fields)}}}"

    def say(self, directory: Path, verb: str, *words: str) -> str:
        """Ask for a pid, or start further children by `supervisor:start_child/2`."""
        if verb == "status":
            return f"pid {words[0]}\n"
        if verb != "scale":
            raise Lacks
        name, old, new = words
        numbers = range(int(old), int(new))
        terms = [self._term(Setup(()), Program(name), number, directory) for number in numbers]
        return "".join(f"add {term}.\n" for term in terms)

    def broken(self, directory: Path) -> list[str]:
        """Run a child whose specification has a wrong restart type."""
        command = self.write(Setup((Program("web"),)), directory)
        path = directory / "children"
        path.write_text(path.read_text().replace("permanent", "permanet"))
        return command


def _otp(installer: Installer) -> Otp:
    """Use the installed Erlang, or unpack Debian's package without installing it."""
    home = installer.directory / "otp"
    home.mkdir()
    if installed := shutil.which("erl"):
        (home / "erl").symlink_to(installed)
    else:
        output_of("apt-get", "download", "erlang-base", cwd=home)
        (archive,) = home.glob("*.deb")
        output_of("dpkg", "-x", str(archive), str(home / "root"))
        root = home / "root/usr/lib/erlang"
        script = root / "bin/erl"
        script.write_text(script.read_text().replace("/usr/lib/erlang", str(root)))
        (home / "erl").symlink_to(script)
        (home / "erlc").symlink_to(root / "bin/erlc")
    path = f"{(home / 'erl').resolve().parent}:{os.environ['PATH']}"
    compiler = (home / "erl").resolve().with_name("erlc")
    output_of(str(compiler), "-o", str(home), str(_OTP), env={**os.environ, "PATH": path})
    code = "io:format(erlang:system_info(otp_release)), halt()"
    release = output_of(str(home / "erl"), "-noshell", "-eval", code)
    return Otp("OTP", release, home)


def _systemd(_: Installer) -> Peer:
    """Systemd runs programs only where it is, or may reach, the first process."""
    output_of("systemd-run", "--wait", "--quiet", "true")
    raise OSError("systemd runs here, and has no configuration in this benchmark yet")


def _process_compose(_: Installer) -> Peer:
    if shutil.which("process-compose"):
        raise OSError("it is here, and has no configuration in this benchmark yet")
    raise OSError("no package of PyPI or Debian has it, and it is not installed")


SUPERVISOR_PEERS: Mapping[str, Callable[[Installer], Peer]] = {
    OURS: lambda _: ElasticAio(OURS, __version__, Path()),
    "supervisord": lambda it: it.pypi(Supervisord, "supervisord", "supervisor"),
    "circus": lambda it: it.pypi(Circus, "circus", "circus"),
    "honcho": lambda it: it.pypi(Honcho, "honcho", "honcho"),
    "OTP": _otp,
    "systemd": _systemd,
    "process-compose": _process_compose,
}
