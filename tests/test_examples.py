"""The files of `examples/` for systemd, Slurm and Kubernetes, by their tools and schemas.

`.ci/run` installs the schemas of Kubernetes; systemd's own check runs where it is installed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import LaunchSpec
from elastic_aio.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"
UNITS = sorted(EXAMPLES.glob("systemd/*.service"))
REAP_TIMEOUT_S = 10
KUBERNETES = "1.30"

all_units = pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)


def settings(unit: Path) -> dict[str, list[str]]:
    """Return the settings of a unit by name; each line that is no comment is one."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


@all_units
def test_a_unit_ends_its_job_by_the_stop_plan(unit: Path) -> None:
    """SIGTERM to the launcher only, and time for the whole plan; the journal has the output."""
    found = settings(unit)
    plan = LaunchSpec(["true"]).stop.grace
    assert found["Type"] == ["notify"]
    assert found["KillMode"] == ["mixed"]
    assert int(found["TimeoutStopSec"][0]) > plan + REAP_TIMEOUT_S
    assert found["RestartPreventExitStatus"] == ["2 126 127"]
    assert found["SuccessExitStatus"] == ["143"]
    assert found["StandardOutput"] == found["StandardError"] == ["journal"]
    assert found["Restart"] == ["on-failure"]
    assert found["StartLimitBurst"]


@all_units
def test_a_unit_says_to_systemd_what_the_launcher_understands(unit: Path) -> None:
    """The launcher notifies; the variables are known; a reload is a signal that it takes."""
    found = settings(unit)
    assert found["NotifyAccess"] == ["main"]
    assert found["LogRateLimitIntervalSec"] == ["0"]
    known = (EXAMPLES.parent / "docs/reference/worker-environment.md").read_text()
    known += (EXAMPLES.parent / "docs/guides/control.md").read_text()
    for variable in found["Environment"]:
        name = variable.partition("=")[0]
        assert f"`{name}`" in known or not name.startswith("ELASTIC_AIO"), name
    reloads = found.get("ExecReload", []) == ["/bin/kill -HUP $MAINPID"]
    assert reloads == ("--reload-on-hup" in found["ExecStart"][0])


@all_units
def test_a_unit_has_a_place_for_the_records_of_runs(unit: Path) -> None:
    """Its user may have no home; no other user can enter the directory."""
    found = settings(unit)
    (directory,) = found["StateDirectory"]
    assert f"XDG_STATE_HOME=%S/{directory}" in found["Environment"]
    assert found["StateDirectoryMode"] == ["0700"]


@all_units
def test_a_unit_names_options_that_exist(unit: Path) -> None:
    """Also in comments; the limits of a file of jobs have no option."""
    comments = " ".join(re.findall(r"^#.*", unit.read_text(), re.MULTILINE))
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z][\w-]+", shown.getvalue())) | {"--now"}  # of systemctl
    assert set(re.findall(r"--[a-z][\w-]+", comments)) <= known
    if "Delegate" in settings(unit):
        assert "[children.NAME.limits]" in comments


@all_units
def test_the_command_of_a_unit_is_valid(
    unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As systemd would start it, with `--dry-run`."""
    (tmp_path / "train.py").touch()
    (tmp_path / "web.toml").write_text('[children.web]\ncommand = "true"\n')
    (start,) = settings(unit)["ExecStart"]
    start = start.replace("${LOGS_DIRECTORY}", str(tmp_path / "logs"))
    env, program, command, *words = shlex.split(
        start.replace("/etc/jobs/%i", str(tmp_path / "web"))
    )
    assert (env, program) == ("/usr/bin/env", "aio-elastic")
    monkeypatch.chdir(tmp_path)
    assert main([command, "--dry-run", *words]) == 0, capfd.readouterr().err


FILES_OF_JOBS = [
    (page.name, block)
    for page in sorted(EXAMPLES.parent.glob("docs/guides/*.md"))
    for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    if "[children." in block
]


@pytest.mark.parametrize(("page", "text"), FILES_OF_JOBS, ids=[page for page, _ in FILES_OF_JOBS])
def test_the_files_of_jobs_in_the_guides_are_valid(
    page: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `aio-elastic up --dry-run` reads them."""
    (tmp_path / "train.py").touch()
    (tmp_path / "jobs.toml").write_text(text)
    assert main(["up", "--dry-run", str(tmp_path / "jobs.toml")]) == 0, capfd.readouterr().err


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.slow
@all_units
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    """A template by an instance; an unknown setting is a warning, which has to be absent too."""
    name = unit.name.replace("@.", "@web.")
    path = tmp_path / name
    path.write_text(unit.read_text())
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    of_others = re.compile(
        r"^(?!.*" + re.escape(unit.name.partition(".")[0].rstrip("@")) + r").*\n", re.M
    )
    assert of_others.sub("", ended.stderr) == ""
    assert ended.returncode == 0, ended.stderr


def test_the_batch_script_is_valid() -> None:
    script = EXAMPLES / "slurm.sbatch"
    ended = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    head = script.read_text().partition("\nsrun")[0]
    directives = re.findall(r"^#SBATCH --[a-z-]+(?:=\S+)?$", head, re.MULTILINE)
    assert len(directives) == script.read_text().count("\n#SBATCH"), "a directive after a command"


def test_the_command_of_the_batch_script_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `srun` gets it, with `--dry-run`; the checkpoint is where all nodes have it."""
    tool = tmp_path / "srun"
    tool.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env["SLURM_SUBMIT_DIR"] = "/shared/my work"
    ended = subprocess.run(
        ["bash", EXAMPLES / "slurm.sbatch"], capture_output=True, text=True, check=True, env=env
    )
    words = ended.stdout.splitlines()
    command = words[words.index("aio-elastic") :]
    assert command[-2:] == ["--checkpoint", "/shared/my work/train-7.pt"]
    assert "gpu" in command
    assert command[command.index("--device") + 1] == "cuda"
    for needs_devices, other in (("gpu", "2"), ("node", "cpu")):
        command[command.index(needs_devices)] = other
    monkeypatch.chdir(EXAMPLES.parent)
    assert main([command[1], "--dry-run", *command[2:]]) == 0, capfd.readouterr().err


def test_the_batch_script_gives_time_to_save() -> None:
    """The notice of Slurm leaves time for the deadline and the plan; the codes are ours."""
    script = (EXAMPLES / "slurm.sbatch").read_text()
    signal, seconds = re.findall(r"^#SBATCH --signal=(\w+)@(\d+)$", script, re.MULTILINE)[0]
    assert f"--preempt-signal {signal} " in script
    (deadline,) = re.findall(r"--preempt-deadline (\d+)", script)
    assert int(deadline) + LaunchSpec(["true"]).stop.grace < int(seconds)
    page = (EXAMPLES.parent / "docs/reference/exit-codes.md").read_text()
    scheduler = page.partition("### For a scheduler")[2]
    again = set(re.findall(r"^\| (\d+)(?:, \d+)* \| (?:yes|often)", scheduler, re.MULTILINE))
    (tried,) = re.findall(r"=~ \^\(([\d|]+)\)", script)
    assert {*tried.split("|"), "85"} == again - {"143"}
    assert "[[ $code == 85 ]]" in script


@pytest.mark.parametrize(
    ("code", "preempted_at", "restarts", "is_requeued"),
    [
        (0, "None", 0, False),
        (0, "2026-11-29T18:06:19", 0, False),  # the program has ended in time
        (1, "None", 0, False),
        (85, "None", 9, True),
        (85, "2026-11-29T18:06:19", 0, True),
        (143, "2026-11-29T18:06:19", 9, True),
        (1, "2026-11-29T18:06:19", 0, True),  # a rank has lost another one
        (143, "None", 0, False),  # scancel --signal=TERM
        (69, "None", 4, True),
        (69, "None", 5, False),
    ],
)
def test_the_batch_script_requeues_once_what_slurm_does_not(
    code: int, preempted_at: str, restarts: int, is_requeued: bool, tmp_path: Path
) -> None:
    log, tools = tmp_path / "log", {"srun": f"exit {code}"}
    state = f"JobId=7\n   PreemptEligibleTime=2026-11-29T18:05:18 PreemptTime={preempted_at}"
    tools["scontrol"] = f'[ $1 = show ] && echo "{state}" || echo "$*" >> "{log}"'
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    ended = subprocess.run(["bash", EXAMPLES / "slurm.sbatch"], env=env, check=False)
    assert ended.returncode == code
    assert (log.read_text() if log.exists() else "") == "requeue 7\n" * is_requeued


JOB_SET = {"replicatedJobs", "failurePolicy", "successPolicy", "network", "suspend"}
FAILURE_POLICY = {"maxRestarts", "restartStrategy", "rules"}
RULE = {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"}
"""Of jobset.x-k8s.io/v1alpha2, and the reasons of a failed Job of batch/v1."""


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [*yaml.safe_load_all((EXAMPLES / name).read_text())]


def check_schema(document: dict[str, Any]) -> None:
    """Check a resource against the schema of Kubernetes; unknown fields are errors."""
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(document, KUBERNETES, strict=True)


def launch_words(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    return words


def check_job(job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a Job of two pods, and its command as the first pod has it."""
    check_schema(job)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["JOB_COMPLETIONS"] == str(spec["completions"]) == str(spec["parallelism"])
    program, *words = launch_words(job)
    words = [word for word in words if not word.startswith("--nproc-per-node")]
    (deadline,) = (word for word in words if word.startswith("--preempt-deadline="))
    plan = LaunchSpec(["true"]).stop.grace
    assert pod["terminationGracePeriodSeconds"] >= int(deadline.partition("=")[2]) + plan
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in {**variables, "JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "train-0"}.items():
        monkeypatch.setenv(name, value)
    assert program == "aio-elastic"
    assert main([words[0], "--dry-run", *words[1:]]) == 0
    if any(word.startswith("--http=") for word in words):
        (port,) = container["ports"]
        assert f"--http=0.0.0.0:{port['containerPort']}" in words
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}


def test_the_indexed_job_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = documents("indexed-job.yaml")
    check_schema(service)
    check_job(job, tmp_path, monkeypatch)
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    selector = service["spec"]["selector"]
    assert selector == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_the_job_set_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job_set,) = documents("jobset.yaml")
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec, policy = job_set["spec"], job_set["spec"]["failurePolicy"]
    assert spec.keys() <= JOB_SET
    assert policy.keys() <= FAILURE_POLICY
    for rule in policy["rules"]:
        assert rule.keys() <= RULE
        assert rule["action"] in ACTIONS
        assert {*rule["onJobFailureReasons"]} <= REASONS
    (replicated,) = spec["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]
    assert rules == documents("indexed-job.yaml")[1]["spec"]["podFailurePolicy"]
    assert replicated.keys() <= {"name", "replicas", "template", "groupName", "dependsOn"}
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
    check_job({**head, **replicated["template"]}, tmp_path, monkeypatch)
