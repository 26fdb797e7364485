"""Which generation of which job a member takes part in when it comes to a store."""

from __future__ import annotations

import asyncio
import contextlib
import math

from msgspec import Struct

from elastic_aio.discovery.jobs import enter_run, former_jobs_key
from elastic_aio.discovery.keys import RunEnd, RunRecord, read_run, run_key
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.errors import StoreLost
from elastic_aio.rendezvous.election import first_result, next_value
from elastic_aio.rendezvous.member import Member
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart_budget import RestartBudget


class FormerStay(Struct, frozen=True):
    """What a member knows of the last store at which it took part.

    Attributes:
        leased_until: until when its lease there cannot have ended, by the clock of the loop.
        goes_on_in: the job in which its job goes on, if that store has a final `RunMove`: empty
            for none.
        knows_failure: whether that store may have a failure of its workers.
    """

    leased_until: float = -math.inf
    goes_on_in: str | None = None
    knows_failure: bool = False

    @property
    def is_leased(self) -> bool:
        """Whether the lease cannot have ended until now."""
        return asyncio.get_running_loop().time() < self.leased_until


class RunEntry:
    """Finds the generation to take part in at one store."""

    def __init__(
        self,
        located: LocatedStore,
        spec: RendezvousSpec,
        run_id: str,
        program: str,
        member: Member,
        budget: RestartBudget,
        former: FormerStay,
    ) -> None:
        """Prepare; `former` is where the member has taken part last.

        `program` is a name of what its workers run, and `budget` that of its job.
        """
        self._located = located
        self._spec = spec
        self._run_id = run_id
        self._program = program
        self._budget = budget
        self._member = member
        self._former = former

    async def find(self) -> tuple[RunRecord, RunEnd | None] | None:
        """Return the generation, and its end if it is over.

        None: another job runs there, and the end of this member's own is not known.

        Raises:
            StoreError: the store is lost.
        """
        may_begin = self._located.is_host and not (
            self._may_have_ended or self._member.has_seen_success
        )
        return await self._look(may_begin=may_begin) or await self._wait()

    @property
    def _may_have_ended(self) -> bool:
        """Whether the job may have ended with success at a store that is no longer known."""
        is_open = self._former.is_leased and not self._member.status.moves
        return self._member.has_succeeded and not is_open

    def _goes_on(self, job: str) -> bool:
        """Whether the member's job cannot have ended at the former store, and may join `job`."""
        if self._former.goes_on_in is not None:
            return self._former.goes_on_in == job
        status = self._member.status
        is_spent = self._budget.is_exhausted(status.runtime)
        is_open = status.is_busy or status.pending_restart is not None
        # A failure ends no job that may be restarted, nor one whose coordinator has not seen it.
        is_final = self._former.knows_failure and is_spent
        has_succeeded = self._member.has_succeeded or self._member.has_seen_success
        may_go_on = not (has_succeeded or is_final)
        return self._former.is_leased and (is_open or may_go_on)

    async def _look(self, *, may_begin: bool) -> tuple[RunRecord, RunEnd | None] | None:
        return await enter_run(
            self._located.store,
            self._run_id,
            program=self._program,
            job=self._member.job,
            reuse=self._spec.reuse,
            is_committed=self._member.is_committed,
            goes_on=self._goes_on,
            may_begin=may_begin,
        )

    async def _wait(self) -> tuple[RunRecord, RunEnd | None] | None:
        """Wait until a node that runs workers of this job shows where it goes on.

        Such a node has lost the same store, and comes within the time of a lease.  If the job
        may have ended, and no other one has begun, this node waits for such a node until the end
        of its exit barrier.
        """
        run_id, store = self._run_id, self._located.store
        async with (
            store.watch(run_key(run_id)) as runs,
            store.watch(former_jobs_key(run_id)) as jobs,
        ):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._spec.heartbeat_timeout):
                        while (entry := await self._look(may_begin=False)) is None:
                            await first_result([next_value(runs), next_value(jobs)])
                        return entry
                is_empty = await read_run(store, run_id) is None
                if is_empty and await self._located.is_known_elsewhere(self._member.job):
                    raise StoreLost("its job is known at another endpoint")
                if self._member.has_seen_success:
                    return None
                if not (is_empty and self._may_have_ended):
                    return await self._look(may_begin=True)
                # No event reports a store that begins elsewhere: look there again.
