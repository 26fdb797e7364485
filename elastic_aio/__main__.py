"""`python -m elastic_aio` is `aio-elastic`."""

from elastic_aio.cli import entry

if __name__ == "__main__":
    raise SystemExit(entry())
