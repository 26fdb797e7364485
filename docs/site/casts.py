from pathlib import Path


def write_page(path: Path) -> None:
    path.write_text("# Recordings\n")
