"""Never run: a type checker in strict mode reads a star import."""

from elastic_aio import *


def job() -> LaunchSpec:
    """Use names of several modules."""
    return LaunchSpec("train.py", restart=RestartPolicy(), stop=StopPlan.within(5))


async def run_job(spec: LaunchSpec) -> LaunchResult | Failure | None:
    """The root cause may be missing."""
    try:
        return await launch(spec)
    except JobFailed as error:
        return error.root_cause
