"""The state of a job over HTTP: read-only pages for probes, Prometheus and people.

`StatusServer` serves them, `status_app` makes them part of another app.  Both need the extra
`http`, and show what the events of one agent say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.http.app import status_app as status_app
    from elastic_aio.http.server import StatusServer as StatusServer
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"elastic_aio.http.app": "status_app", "elastic_aio.http.server": "StatusServer"},
    )
