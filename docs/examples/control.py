"""A job of this host, from another program: here, of the same one."""

# %%
import asyncio

from elastic_aio import Agent, JobEnded, LaunchSpec
from elastic_aio.control import (
    DoneReply,
    DumpReply,
    EndReply,
    JobClient,
    RunningJob,
    connect,
    list_jobs,
)


async def control() -> None:
    spec = LaunchSpec(["sleep", "60"], run_id="controlled")
    async with Agent(spec, control=True) as agent:
        jobs: list[RunningJob] = await list_jobs()
        print([job.status and job.status.run_id for job in jobs])
        client: JobClient
        async with connect("controlled") as client:
            dump: DumpReply = await client.dump()
            print(dump.text.partition("\n")[0])
            sent: DoneReply = await client.signal("SIGCONT")
            print(sent.is_done)
            end: EndReply | None = await client.stop("enough")
            print(end and end.exit_code)  # 143
        try:
            await agent.wait()
        except JobEnded as ended:
            print(ended)


asyncio.run(control())
