from pathlib import Path


def write_all(target: Path) -> None: ...
